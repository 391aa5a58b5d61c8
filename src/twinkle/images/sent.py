"""Images as clients send them, before the model's image processor has said how many tokens each becomes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinkle.images.decoding import EncodedImage


@dataclass(frozen=True)
class SentImage:
    """An image file that stands between tokens of text.

    ``before``: how many tokens of text stand before it in its sequence. ``expected_tokens``: how many tokens its client
    counts for it, if the client says so. ``field`` names the image in errors.
    """

    before: int
    file: EncodedImage
    expected_tokens: int | None
    field: str


@dataclass(frozen=True)
class SentPatches:
    """The images of a sequence as patches, which the client's own image processor made.

    The tokens of the sequence have the model's image token at their places already. ``patches``: of all images, one row
    each. ``grids`` (images, 3): frames (1), rows and columns of each image, in patches. ``fields``: the names of
    both in errors.
    """

    patches: NDArray[np.float32]
    grids: NDArray[np.int64]
    fields: tuple[str, str]


@dataclass(frozen=True)
class SentImages:
    """The images of one sequence, in their order: files, or patches, or none.

    ``beside``: the files stand beside the tokens, which have the model's image token at their places: one for each
    image, or as many as each image becomes. Then ``before`` of the files is not read. ``types`` (T,): 1 for the tokens
    of images, 0 for all others; None: each image token of the model belongs to an image. It is for patches and for
    files beside tokens.
    """

    files: tuple[SentImage, ...] = ()
    patches: SentPatches | None = None
    beside: bool = False
    types: NDArray[np.int64] | None = None

    @property
    def field(self) -> str:
        """Return the name of the field that has the first image."""
        return self.files[0].field if self.patches is None else self.patches.fields[0]

    def __bool__(self) -> bool:
        return bool(self.files) or self.patches is not None


NO_IMAGES = SentImages()
