"""Keeps the features of images, so that the vision tower sees an image once and not in every epoch."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage, ImageProcessing
from twinkle.model.types import FloatArray, Image
from twinkle.model.vision.tower import ImageFeatures, Tower

_Key = tuple[str, int, int]  # digest, rows and columns of an image

_PATCHES_AT_ONCE = 16384  # of a pass through the tower; a single larger image is a pass of its own


class FeatureStore:
    """Features by the digests of their images. Those used last are kept, within two limits.

    A GPU holds the features of the images used last; others are in host memory. On a CPU there is only host memory.
    Digests of different tenants differ, so no tenant gets what was computed for another one.
    """

    def __init__(self, tower: Tower, processing: ImageProcessing | None, *, device_bytes: int, host_bytes: int) -> None:
        """``processing``: of the model; None: images must come as patches."""
        self._tower = tower
        self._processing = processing
        on_gpu = tower.device.type != "cpu"
        self._device = _Recent(device_bytes if on_gpu else host_bytes, self._page_out if on_gpu else None)
        self._host = _Recent(host_bytes, None)
        self.computed = 0  # images that the tower has seen
        self.reused = 0  # images whose features were still here

    def get(self, images: Sequence[Image]) -> list[ImageFeatures]:
        """Return the features of images, on the device. What is missing is computed together."""
        found = {_key(image): self._find(_key(image)) for image in images}
        missing = {_key(image): image for image in images if found[_key(image)] is None}
        self.computed += len(missing)
        self.reused += len(found) - len(missing)
        made = self._compute(list(missing.values()))
        features = {**found, **dict(zip(missing, made, strict=True))}
        for key, each in features.items():
            assert each is not None
            self._device.put(key, each)
        return [features[_key(image)] for image in images]  # type: ignore[misc]

    def decoded(self, image: Image, field: str) -> Image:
        """Return an image with its patches, unless its features are here. Raises for one that cannot be decoded."""
        if not isinstance(image.pixels, EncodedImage) or self._find(_key(image)) is not None:
            return image
        return replace(image, pixels=self._patches(image, field))

    def _find(self, key: _Key) -> ImageFeatures | None:
        kept = self._device.get(key)
        if kept is not None:
            return kept
        paged = self._host.get(key)
        return None if paged is None else paged.to(self._tower.device)

    def _page_out(self, key: _Key, features: ImageFeatures) -> None:
        if self._host.get(key) is None:
            self._host.put(key, features.to(torch.device("cpu")))

    def _compute(self, images: Sequence[Image]) -> list[ImageFeatures]:
        made: list[ImageFeatures] = []
        batch: list[tuple[FloatArray, tuple[int, int]]] = []
        for image in images:
            patches = self._patches(image, "images")
            if batch and sum(len(each) for each, _ in batch) + len(patches) > _PATCHES_AT_ONCE:
                made += self._tower.features(batch)
                batch = []
            batch.append((patches, (image.rows, image.columns)))
        return made + self._tower.features(batch) if batch else made

    def _patches(self, image: Image, field: str) -> FloatArray:
        if not isinstance(image.pixels, EncodedImage):
            return image.pixels
        if self._processing is None:
            raise InvalidInputError(field, "an image file", "patches: the model's folder has no image processor")
        patches, size = self._processing.patches(image.pixels, field)
        if (size.rows, size.columns) != (image.rows, image.columns):
            given, allowed = f"{image.rows} × {image.columns} tokens", f"{size.rows} × {size.columns}, its size"
            raise InvalidInputError(field, given, allowed)
        return patches


class _Recent:
    """Features, up to a number of bytes. Those that were used longest ago leave first."""

    def __init__(self, most_bytes: int, leaving: Callable[[_Key, ImageFeatures], None] | None) -> None:
        self._most, self._leaving = most_bytes, leaving
        self._kept: OrderedDict[_Key, ImageFeatures] = OrderedDict()
        self._bytes = 0

    def get(self, key: _Key) -> ImageFeatures | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: _Key, features: ImageFeatures) -> None:
        if key not in self._kept:
            self._kept[key] = features
            self._bytes += features.nbytes
        self._kept.move_to_end(key)
        while self._bytes > self._most:
            oldest, left = self._kept.popitem(last=False)
            self._bytes -= left.nbytes
            if self._leaving is not None:
                self._leaving(oldest, left)


def _key(image: Image) -> _Key:
    return image.digest, image.rows, image.columns
