"""What a model's own image processor makes of an image: its patches, and how many tokens it becomes."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.images.decoding import EncodedImage, ImageLimits, read_image, read_size

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

# Families whose images we place. Others with a vision tower are trained and sampled on text alone.
VISION_FAMILIES = frozenset({"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})

PROCESSOR = "preprocessor_config.json"  # of a model's folder: the settings of its image processor


@dataclass(frozen=True)
class ResizedImage:
    """An image at the size at which a model sees it: RGB, (height, width, 3) of bytes.

    It takes an eighth of the memory of the patches that are made of it.
    """

    rgb_HW3: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.rgb_HW3.nbytes


@dataclass(frozen=True)
class ImageSize:
    """The size of an image in tokens: each token stands for a square of patches."""

    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class ImageProcessing:
    """The image processor of a model's folder, always in Transformers' implementation on Pillow.

    Its other implementation needs torchvision and resizes by different code, so results would depend on what is
    installed.
    """

    def __init__(self, processor: Any, limits: ImageLimits | None = None) -> None:
        self._processor = processor
        self.merge: int = processor.merge_size  # patches on a side of a token's square
        self.patch: int = processor.patch_size  # pixels on a side of a patch
        self.times: int = processor.temporal_patch_size  # pictures in a patch: an image is there so many times
        self._side: int = self.patch * self.merge  # pixels on a side of a token's square
        self.limits = limits or ImageLimits()

    @classmethod
    def from_folder(cls, folder: Path) -> "ImageProcessing | None":
        """Load the image processor of a model; None if the model's folder has none."""
        if not (folder / PROCESSOR).is_file():
            return None
        require("PIL", "images")
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        except ImportError:  # Transformers 5.17 and earlier need torchvision for it
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return cls(processor)

    def size(self, encoded: EncodedImage, field: str = "image") -> ImageSize:
        """Return how many tokens an image becomes. Its pixels are not decoded."""
        height, width = read_size(encoded, field, self.limits)
        return self.size_of(height, width, field)

    def size_of(self, height: int, width: int, field: str = "image") -> ImageSize:
        """Return how many tokens an image of this height and width, in pixels, becomes."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side, size = self._side, self._processor.size
        try:
            resized = smart_resize(
                height, width, factor=side, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
            )
        except ValueError as error:
            raise InvalidInputError(field, f"{width} × {height} pixels", str(error)) from error
        return ImageSize(resized[0] // side, resized[1] // side)

    def pixels_of(self, size: ImageSize) -> tuple[int, int]:
        """Return height and width, in pixels, of an image of this size as the model sees it."""
        return size.rows * self._side, size.columns * self._side

    def resized(self, encoded: EncodedImage, field: str = "image", limits: ImageLimits | None = None) -> ResizedImage:
        """Decode an image and resize it to what the model sees. ``limits``: instead of those of this object."""
        return self.resized_image(read_image(encoded, field, limits or self.limits), field)

    def resized_image(self, image: "PillowImage", field: str = "image") -> ResizedImage:
        """Resize an image in RGB to what the model sees."""
        size = self.size_of(image.height, image.width, field)
        # Pillow's resize is what the processor calls, too; tests compare the patches with the processor's own.
        seen = image.resize((size.columns * self._side, size.rows * self._side), self._processor.resample)
        return ResizedImage(np.asarray(seen))

    def size_seen(self, resized: ResizedImage) -> ImageSize:
        """Return how many tokens a resized image has."""
        height, width, _ = resized.rgb_HW3.shape
        return ImageSize(height // self._side, width // self._side)

    def patches_of(self, resized: ResizedImage) -> NDArray[np.float32]:
        """Return the patches of a resized image, one row each, in the order that the model's vision tower reads."""
        if self.levels is None:
            return self._by_processor(resized.rgb_HW3)
        numbers_HW3 = np.stack(
            [levels_V[plane] for levels_V, plane in zip(self.levels, resized.rgb_HW3.transpose(2, 0, 1), strict=True)],
            axis=2,
        )
        return self._arranged(numbers_HW3)

    @cached_property
    def levels(self) -> NDArray[np.float32] | None:
        """Return the numbers in patches for each byte of each colour, (3, 256); None if they depend on more than that.

        The processor computes with each byte by itself, so a table of its results gives the same bits, sooner.
        """
        side = 2 * self._side
        random = np.random.default_rng(0)  # every byte in every colour, with other neighbours each time
        bytes_HW3 = np.stack([random.permutation(side * side) % 256 for _ in range(3)], -1).astype(np.uint8)
        bytes_HW3 = bytes_HW3.reshape(side, side, 3)
        made, colours = self._by_processor(bytes_HW3), np.broadcast_to(np.arange(3), bytes_HW3.shape)
        levels_CV = np.zeros((3, 256), np.float32)
        bytes_, colour = self._arranged(bytes_HW3), self._arranged(colours)
        if made.shape != bytes_.shape:
            return None
        levels_CV[colour, bytes_] = made
        return levels_CV if np.array_equal(levels_CV[colour, bytes_], made) else None

    def _by_processor(self, rgb_HW3: NDArray[np.uint8]) -> NDArray[np.float32]:
        made = self._processor(
            images=[rgb_HW3], do_resize=False, input_data_format="channels_last", return_tensors="np"
        )
        patches: NDArray[np.float32] = made["pixel_values"]
        return patches

    def _arranged(self, pixels_HW3: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of pixels in the order of patches, one patch a row."""
        merge, patch = self.merge, self.patch
        rows, columns = (length // self._side for length in pixels_HW3.shape[:2])
        # (rows, columns) of squares, each of (merge, merge) patches of (3, time, patch, patch); all times are equal
        squares = pixels_HW3.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        timed = np.broadcast_to(squares[:, :, :, :, :, None], (*squares.shape[:5], self.times, patch, patch))
        return timed.reshape(rows * columns * merge**2, -1)

    def picture(self, patches: NDArray[np.float32], size: ImageSize) -> ResizedImage:
        """Return the image that patches were made of: the inverse of :meth:`patches_of`.

        Engines that prepare images themselves, such as vLLM, take pictures, and clients may send patches alone.
        """
        merge, patch = self.merge, self.patch
        # (rows, columns, merge, merge) squares of patches; a patch is (3, time, patch, patch), and its times are equal
        grid = patches.reshape(size.rows, size.columns, merge, merge, 3, -1, patch, patch)[..., 0, :, :]
        planes = grid.transpose(0, 2, 5, 1, 3, 6, 4).reshape(size.rows * self._side, size.columns * self._side, 3)
        values = planes * np.asarray(self._processor.image_std) + np.asarray(self._processor.image_mean)
        return ResizedImage((values / self._processor.rescale_factor).round().clip(0, 255).astype(np.uint8))

    @property
    def processor(self) -> Any:
        """Return Transformers' image processor."""
        return self._processor

    def patches(self, encoded: EncodedImage, field: str = "image") -> tuple[NDArray[np.float32], ImageSize]:
        """Decode an image. Return its patches, one row each, in the order that the model's vision tower reads."""
        resized = self.resized(encoded, field)
        return self.patches_of(resized), self.size_seen(resized)
