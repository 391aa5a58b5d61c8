"""Keeps the features of images, so that the vision tower sees an image once and not in every epoch."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from twinkle.errors import InvalidInputError
from twinkle.images import EncodedImage, ImageProcessing, ResizedImage
from twinkle.model.types import FloatArray, Image
from twinkle.model.vision.device_patches import DevicePatches
from twinkle.model.vision.tower import ImageFeatures, Tower

_Key = tuple[str, int, int]  # digest, rows and columns of an image
_TowerBatch = list[tuple[ResizedImage | FloatArray, tuple[int, int]]]  # images or their patches, rows and columns

_PATCHES_AT_ONCE = 16384  # of a pass through the tower; a single larger image is a pass of its own


class FeatureStore:
    """Features by the digests of their images. Those used last are kept, within two limits.

    A GPU holds the features of the images used last; others are in pinned host memory. On a CPU there is only host
    memory.
    Digests of different tenants differ, so no tenant gets what was computed for another one.
    """

    def __init__(self, tower: Tower, processing: ImageProcessing | None, *, device_bytes: int, host_bytes: int) -> None:
        """``processing``: of the model; None: images must come as patches."""
        self._tower = tower
        self.processing = processing
        on_gpu = tower.device.type != "cpu"
        self._device_patches = (
            DevicePatches(processing, tower.device)
            if on_gpu and processing is not None and processing.levels is not None
            else None
        )
        self._held: Counter[_Key] = Counter()  # how many calls need the features of an image
        self._device = (
            _Recent[ImageFeatures](device_bytes, leaving=self._page_out)
            if on_gpu
            else _Recent[ImageFeatures](host_bytes, held=self._held)
        )
        self._host = _Recent[HostCopy](host_bytes, held=self._held)
        self.computed = 0  # images that the tower has seen
        self.reused = 0  # images whose features were still here

    def get(self, images: Sequence[Image], *, count_reused: bool = True) -> list[ImageFeatures]:
        """Return the features of images, on the device. What is missing is computed together."""
        found = {_key(image): self._find(_key(image)) for image in images}
        missing = {_key(image): image for image in images if found[_key(image)] is None}
        made = self._compute(list(missing.values()))
        self.computed += len(missing)
        self.reused += len(found) - len(missing) if count_reused else 0
        features = {**found, **dict(zip(missing, made, strict=True))}
        for key, each in features.items():
            assert each is not None
            self._device.put(key, each)
        return [features[_key(image)] for image in images]  # type: ignore[misc]

    def has(self, image: Image) -> bool:
        """Return whether the features of an image are here. May be called in any thread."""
        return _key(image) in self._device or _key(image) in self._host

    def hold(self, images: Iterable[Image]) -> None:
        """Keep the features of images, known or not yet known, until :meth:`release`, even beyond the limits.

        A call holds the images of its batch: otherwise one that is known would be dropped for others of the same call,
        and decoded again in the compute thread.
        """
        self._held.update(map(_key, images))

    def release(self, images: Iterable[Image]) -> None:
        """Let go of images that were held."""
        self._held.subtract(map(_key, images))
        for key in [key for key, count in self._held.items() if not count]:
            del self._held[key]

    def forget(self) -> None:
        """Forget all features, because the tower has other weights now."""
        self._device.clear()
        self._host.clear()

    def decoded(self, image: Image, field: str) -> Image:
        """Return an image that is decoded, unless its features are here. Raises for one that cannot be decoded.

        What was in a file stays resized until the tower sees it, because patches take eight times the memory.
        """
        if isinstance(image.pixels, EncodedImage) and self.has(image):
            return image
        return replace(image, pixels=self._pixels(image, field))

    def _find(self, key: _Key) -> ImageFeatures | None:
        kept = self._device.get(key)
        if kept is not None:
            return kept
        paged = self._host.get(key)
        return None if paged is None else paged.on_device(self._tower.device)

    def _page_out(self, key: _Key, features: ImageFeatures) -> None:
        if self._host.get(key) is None:
            self._host.put(key, HostCopy(features))

    def _compute(self, images: Sequence[Image]) -> list[ImageFeatures]:
        made: list[ImageFeatures] = []
        batch: _TowerBatch = []
        patches = 0
        for image in images:
            pixels = self._pixels(image, "images")
            more = self._count_patches(pixels, image)
            if batch and patches + more > _PATCHES_AT_ONCE:
                made += self._seen(batch)
                batch, patches = [], 0
            batch.append((pixels, (image.rows, image.columns)))
            patches += more
        return made + self._seen(batch) if batch else made

    def _seen(self, batch: _TowerBatch) -> list[ImageFeatures]:
        """Run the tower, in halves where the device has too little memory for all images at once.

        The caller would take a lack of memory for one of the decoder, and make its batches smaller for good.
        """
        try:
            return self._features(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1 and not self._device.nbytes:
                raise
        if len(batch) > 1:
            half = len(batch) // 2
            return self._seen(batch[:half]) + self._seen(batch[half:])
        self._device.drop_all()  # what the features of other images take is enough for many patches
        return self._features(batch)

    def _features(self, batch: _TowerBatch) -> list[ImageFeatures]:
        return self._tower.features([(self._patches(pixels), size) for pixels, size in batch])

    def _count_patches(self, pixels: ResizedImage | FloatArray, image: Image) -> int:
        if not isinstance(pixels, ResizedImage):
            return len(pixels)
        assert self.processing is not None, "without it _pixels raises"
        return image.rows * image.columns * self.processing.merge**2

    def _patches(self, pixels: ResizedImage | FloatArray) -> FloatArray | Tensor:
        if not isinstance(pixels, ResizedImage):
            return pixels
        assert self.processing is not None, "without it _pixels raises"
        on_device = self._device_patches
        return self.processing.patches_of(pixels) if on_device is None else on_device.make(pixels)

    def _pixels(self, image: Image, field: str) -> ResizedImage | FloatArray:
        """Return the pixels of an image, decoded. Raises for a file that is damaged, or of another size."""
        pixels, processing = image.pixels, self.processing
        if not isinstance(pixels, EncodedImage | ResizedImage):
            return pixels
        if processing is None:
            raise InvalidInputError(field, "an image file", "patches: the model's folder has no image processor")
        if isinstance(pixels, EncodedImage):
            pixels = processing.resized(pixels, field)
        size = processing.size_seen(pixels)
        if (size.rows, size.columns) != (image.rows, image.columns):
            given, allowed = f"{image.rows} × {image.columns} tokens", f"{size.rows} × {size.columns}, its size"
            raise InvalidInputError(field, given, allowed)
        return pixels


class HostCopy:
    """Features in pinned host memory. Copies from and to the GPU run beside its other work, and nothing waits for them.

    A stream that reads the copy waits for the one that writes it.
    """

    def __init__(self, features: ImageFeatures) -> None:
        self._pinned = features.changed(_to_pinned)
        self._written = torch.cuda.Event()
        self._written.record(torch.cuda.current_stream(features.embeddings_nH.device))

    @property
    def nbytes(self) -> int:
        """Return the memory that the copy takes. torch rounds pinned memory up to the next power of two."""
        tensors = (self._pinned.embeddings_nH, *self._pinned.added)
        return sum(1 << (each.nbytes - 1).bit_length() for each in tensors)

    def on_device(self, device: torch.device) -> ImageFeatures:
        torch.cuda.current_stream(device).wait_event(self._written)
        return self._pinned.changed(lambda tensor: tensor.to(device, non_blocking=True))


def _to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


F = TypeVar("F", bound=_Sized)


class _Recent(Generic[F]):
    """Features, up to a number of bytes. Those that were used longest ago leave first; those that are held stay."""

    def __init__(
        self,
        most_bytes: int,
        *,
        leaving: Callable[[_Key, F], None] | None = None,
        held: Mapping[_Key, int] = MappingProxyType({}),
    ) -> None:
        self._most, self._leaving, self._held = most_bytes, leaving, held
        self._kept: OrderedDict[_Key, F] = OrderedDict()
        self._bytes = 0

    def __contains__(self, key: _Key) -> bool:
        return key in self._kept

    @property
    def nbytes(self) -> int:
        return self._bytes

    def get(self, key: _Key) -> F | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def put(self, key: _Key, features: F) -> None:
        if key not in self._kept:
            self._kept[key] = features
            self._bytes += features.nbytes
        self._kept.move_to_end(key)
        self._shrink(self._most)

    def drop_all(self) -> None:
        """Let all features leave that are not held."""
        self._shrink(0)

    def _shrink(self, most: int) -> None:
        if self._bytes <= most:
            return
        for key in [key for key in self._kept if key not in self._held]:
            left = self._kept.pop(key)
            self._bytes -= left.nbytes
            if self._leaving is not None:
                self._leaving(key, left)
            if self._bytes <= most:
                return


def _key(image: Image) -> _Key:
    return image.digest, image.rows, image.columns
