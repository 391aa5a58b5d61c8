"""What a model's own image processor makes of an image: its patches, and how many tokens it becomes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.images.decoding import EncodedImage, ImageLimits, read_image, read_size


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
        self.limits = limits or ImageLimits()

    @classmethod
    def from_folder(cls, folder: Path) -> "ImageProcessing | None":
        """Load the image processor of a model; None if the model's folder has none."""
        if not (folder / "preprocessor_config.json").is_file():
            return None
        require("PIL", "images")
        from transformers import AutoImageProcessor

        return cls(AutoImageProcessor.from_pretrained(folder, backend="pil"))

    def size(self, encoded: EncodedImage, field: str = "image") -> ImageSize:
        """Return how many tokens an image becomes. Its pixels are not decoded."""
        height, width = read_size(encoded, field, self.limits)
        return self.size_of(height, width, field)

    def size_of(self, height: int, width: int, field: str = "image") -> ImageSize:
        """Return how many tokens an image of this height and width, in pixels, becomes."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side, size = self._processor.patch_size * self.merge, self._processor.size
        try:
            resized = smart_resize(
                height, width, factor=side, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
            )
        except ValueError as error:
            raise InvalidInputError(field, f"{width} × {height} pixels", str(error)) from error
        return ImageSize(resized[0] // side, resized[1] // side)

    def patches(self, encoded: EncodedImage, field: str = "image") -> tuple[NDArray[np.float32], ImageSize]:
        """Decode an image. Return its patches, one row each, in the order that the model's vision tower reads."""
        image = read_image(encoded, field, self.limits)
        size = self.size_of(image.height, image.width, field)
        made = self._processor(images=[image], return_tensors="np")
        return made["pixel_values"], size
