"""Puts the features of images into the rows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twinkle.model.decoder.image_rows import ImageRows
from twinkle.model.decoder.transfer import to_device
from twinkle.model.types import Image
from twinkle.model.vision.feature_store import FeatureStore


@dataclass(frozen=True)
class ImagePart:
    """Tokens ``start``…``stop`` of an image, which are the rows of a batch from ``row`` on."""

    image: Image
    start: int
    stop: int
    row: int

    @classmethod
    def whole(cls, image: Image, row: int) -> "ImagePart":
        return cls(image, 0, image.tokens, row)


def image_rows(features: FeatureStore, parts: Sequence[ImagePart], *, repeated: bool = False) -> ImageRows:
    """Return the features of parts of images, of which there must be some, and their rows.

    repeated: the same images are asked for again and again, so those that are found do not count as reused.
    """
    found = features.get([part.image for part in parts], count_reused=not repeated)
    embeddings_nH = torch.cat(
        [each.embeddings_nH[part.start : part.stop] for each, part in zip(found, parts, strict=True)]
    )
    layers = zip(
        *([layer[part.start : part.stop] for layer in each.added] for each, part in zip(found, parts, strict=True)),
        strict=True,
    )
    rows = np.concatenate([np.arange(part.row, part.row + part.stop - part.start) for part in parts])
    rows_n = to_device(torch.from_numpy(rows), embeddings_nH.device)
    return ImageRows(rows_n, embeddings_nH, tuple(torch.cat(layer) for layer in layers))
