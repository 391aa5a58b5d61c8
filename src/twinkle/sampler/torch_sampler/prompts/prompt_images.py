"""The images of a prompt: which of its tokens they are, and what positions the tokens around them have.

An image has as many tokens as squares of patches, but what follows it continues after its longer side. So behind an
image the position of a token, which rotary embeddings read, is smaller than its index, which the cache and the
attention masks use. The difference is the same for all tokens up to the next image: the shift.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twinkle.images import position_axes
from twinkle.model.types import Image, IntArray
from twinkle.model.vision.feature_store import FeatureStore
from twinkle.model.vision.splice import ImagePart


@dataclass(frozen=True)
class SeenTokens:
    """What tokens with images among them need beside their ids.

    axes_3T: their positions on three axes (time, row, column). parts: the parts of images among them; the first token
    is row 0.
    """

    axes_3T: IntArray
    parts: tuple[ImagePart, ...]


def decoded_images(images: Sequence[Image], features: FeatureStore) -> tuple[Image, ...]:
    """Return the images of a request, decoded unless their features are known. Raise for one that is damaged."""
    return tuple(features.decoded(image, f"images[{number}]") for number, image in enumerate(images))


class PromptImages:
    """The images of one prompt, in their order. All samples of a request share them."""

    def __init__(self, prompt_length: int, images: Sequence[Image]) -> None:
        self._length = prompt_length
        self._images = images

    @cached_property
    def _axes(self) -> IntArray:
        """Return the positions of the prompt's tokens, (3, T)."""
        return position_axes(self._length, [(image.first, image.rows, image.columns) for image in self._images])

    def shift(self, index: int) -> int:
        """Return position − index of the token at this index, which is not part of an image."""
        before = (image for image in self._images if image.first < index)
        return sum(max(image.rows, image.columns) - image.tokens for image in before)

    def seen(self, start: int, stop: int) -> SeenTokens | None:
        """Return what tokens ``start``…``stop`` of a sequence need; None if no image is among them."""
        parts = tuple(
            ImagePart(image, first, last, image.first + first - start)
            for image in self._images
            if (first := max(0, start - image.first)) < (last := min(image.tokens, stop - image.first))
        )
        if not parts:
            return None
        behind = np.arange(max(start, self._length), stop) + self.shift(self._length)  # generated tokens
        axes_3T = np.concatenate([self._axes[:, start:stop], np.tile(behind, (3, 1))], 1)
        return SeenTokens(axes_3T, parts)

    def beginning_in(self, start: int, stop: int) -> list[Image]:
        """Return the images whose first tokens are among ``start``…``stop``."""
        return [image for image in self._images if start <= image.first < stop]
