"""Images among the tokens of a request: their places, their sizes, and their names by tenant."""

import numpy as np
import pytest

from tests.support.models.seeing_models import image_processor, picture, png
from twinkle.errors import InvalidInputError, UserError
from twinkle.images import (
    EncodedImage,
    ImageLimits,
    ImageProcessing,
    ResizedImage,
    SentImage,
    SentImages,
    SentPatches,
)
from twinkle.model.types import Image, VisionSpec
from twinkle.server.backends.image_reader import ImageReader, Placed

PAD = 99
VISION = VisionSpec(image_token=PAD, patch_width=1536, merge=2)
PROCESSING = ImageProcessing(image_processor())


class Knows:
    """A trainer that has the features of the images with these digests."""

    def __init__(self, *digests: str) -> None:
        self._digests = digests

    def wants_pixels(self, image: Image) -> bool:
        return image.digest not in self._digests

    def image_counts(self) -> tuple[int, int]:
        return 3, 4


READER = ImageReader("model", VISION, PROCESSING, Knows())
WIDE, TALL = png(picture(32, 96)), png(picture(64, 32, 1))  # 1 × 3 and 2 × 1 tokens
TEXT = np.array([1, 2, 3])


def sent(*images: tuple[int, EncodedImage], expected: int | None = None) -> SentImages:
    return SentImages(tuple(SentImage(place, file, expected, f"chunks[{place}]") for place, file in images))


def place(images: SentImages, tenant: str = "a", room: int = 100, limits: ImageLimits | None = None) -> Placed:
    return READER.place(TEXT, images, tenant, limits or ImageLimits(), room)


def test_images_between_tokens() -> None:
    placed = place(sent((0, TALL), (2, WIDE), (2, TALL), (3, WIDE)))
    assert placed.tokens.tolist() == [PAD, PAD, 1, 2, *[PAD] * 5, 3, *[PAD] * 3]
    assert [(image.first, image.rows, image.columns) for image in placed.images] == [
        (0, 2, 1),
        (4, 1, 3),
        (7, 2, 1),
        (10, 1, 3),
    ]
    assert placed.pixels == 2 * 32 * 96 + 2 * 64 * 32


def test_a_digest_is_of_one_tenant() -> None:
    mine, theirs = (place(sent((0, WIDE), (3, TALL), (3, WIDE)), tenant).images for tenant in "ab")
    assert mine[0].digest == mine[2].digest != mine[1].digest
    assert not {image.digest for image in mine} & {image.digest for image in theirs}


def test_the_expected_number_of_tokens() -> None:
    assert len(place(sent((0, WIDE), expected=3)).tokens) == 6
    with pytest.raises(
        InvalidInputError, match=r"chunks\[0\]\.expected_tokens: got 4, allowed: 3, what 96 × 32 pixels"
    ):
        place(sent((0, WIDE), expected=4))


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (sent((0, WIDE), (3, WIDE)), {"room": 5}, r"chunks\[3\]: got .*3 tokens.*2 tokens.*max_tokens_per_request"),
        (sent((0, WIDE)), {"limits": ImageLimits(pixels=3000)}, r"chunks\[0\]\.data: got '96 × 32 pixels'.*3000"),
        (sent((0, WIDE)), {"limits": ImageLimits(file_bytes=10)}, r"chunks\[0\]\.data: .*at most 10 bytes"),
        (sent((0, EncodedImage(WIDE.data, "gif"))), {}, r"chunks\[0\]\.format: got 'gif', allowed: png or jpeg"),
        (sent((0, EncodedImage(b"", "png"))), {}, r"chunks\[0\]\.data: got b''"),
    ],
)
def test_refused(images: SentImages, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(images, **options)


def test_decoded_once_and_only_where_it_is_wanted() -> None:
    images = sent((0, WIDE), (1, TALL), (2, WIDE))
    placed = place(images)
    reader = ImageReader("model", VISION, PROCESSING, Knows(placed.images[1].digest))
    first, second, third = reader.decode(placed.images, images, ImageLimits(), {})
    assert isinstance(first.pixels, ResizedImage)
    assert first.pixels is third.pixels
    assert second.pixels is TALL
    np.testing.assert_array_equal(PROCESSING.patches_of(first.pixels), PROCESSING.patches(WIDE)[0])


def test_a_trainer_elsewhere_gets_the_files() -> None:
    images = sent((0, WIDE))
    placed = place(images)
    reader = ImageReader("model", VISION, PROCESSING, None)
    assert reader.decode(placed.images, images, ImageLimits(), {}) == placed.images
    assert (reader.counts(), READER.counts()) == (None, (3, 4))


def test_a_damaged_image_is_found_when_it_is_decoded() -> None:
    images = sent((0, EncodedImage(WIDE.data[:-40], "png")))
    placed = place(images)
    with pytest.raises(InvalidInputError, match=r"chunks\[0\]\.data: got .*a whole png file"):
        READER.decode(placed.images, images, ImageLimits(), {})


def test_a_model_without_an_image_processor() -> None:
    with pytest.raises(InvalidInputError, match=r"no preprocessor_config\.json"):
        ImageReader("model", VISION, None, Knows()).place(TEXT, sent((0, WIDE)), "a", ImageLimits(), 100)


# --- images as patches ------------------------------------------------------------------------------------------------

TWO = np.array([1, *[PAD] * 5, 2])  # an image of 1 × 3 tokens, and one of 2 × 1
GRIDS = [[1, 2, 6], [1, 4, 2]]


def patches(grids: list[list[int]], count: int = 20, width: int = 1536) -> SentImages:
    numbers = np.arange(count * width, dtype=np.float32).reshape(count, width)
    return SentImages(
        patches=SentPatches(numbers, np.array(grids), ("inputs['pixel_values']", "inputs['image_grid_thw']"))
    )


def test_patches() -> None:
    images = patches(GRIDS)
    placed = READER.place(TWO, images, "a", ImageLimits(), 100)
    assert [(image.first, image.rows, image.columns) for image in placed.images] == [(1, 1, 3), (4, 2, 1)]
    assert placed.tokens is TWO
    pixels = [image.pixels for image in READER.decode(placed.images, images, ImageLimits(), {})]
    np.testing.assert_array_equal(np.concatenate(pixels), images.patches.patches)  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("tokens", "images", "message"),
    [
        (TWO, patches([[1, 2, 6]]), r"grids of 3 tokens.*grids of 5 tokens: there are so many tokens 99"),
        (TWO, patches([[2, 2, 6], [1, 4, 2]]), r"\['image_grid_thw'\]\[0\]: got \[2, 2, 6\]"),
        (TWO, patches([[1, 3, 6], [1, 4, 2]]), r"\['image_grid_thw'\]\[0\]: got \[1, 3, 6\]"),
        (TWO, patches([[1, 2, -6], [1, 4, 2]]), r"\['image_grid_thw'\]\[0\]: got \[1, 2, -6\]"),
        (TWO, patches([[1, 2**62, 2**62]]), r"grids of \d+ tokens.*grids of 5 tokens"),
        (TWO, patches(GRIDS, count=19), r"\['pixel_values'\]: got 'shape \(19, 1536\)'"),
        (TWO, patches(GRIDS, width=1176), r"\['pixel_values'\]: got 'shape \(20, 1176\)'"),
        (np.array([PAD, PAD, 1, PAD, PAD, PAD]), patches(GRIDS), r"\['image_grid_thw'\]\[0\].*3 image tokens in a row"),
    ],
)
def test_wrong_patches(tokens: np.ndarray, images: SentImages, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        READER.place(tokens, images, "a", ImageLimits(), 100)
