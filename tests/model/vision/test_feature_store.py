"""The store of image features: what is kept, within which limits, and what moves between GPU and host."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from twinkle import hub
from twinkle.images import ImageProcessing, ResizedImage
from twinkle.model.types import FloatArray, Image
from twinkle.model.vision.device_patches import DevicePatches
from twinkle.model.vision.feature_store import FeatureStore
from twinkle.model.vision.tower import ImageFeatures

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
BYTES = 3 * 4 * 8 * 4  # of an image: three tensors of 4 × 8 numbers


class CountingTower:
    """A tower whose features repeat the first number of an image."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.seen: list[float] = []

    def features(self, images: Sequence[tuple[FloatArray, tuple[int, int]]]) -> list[ImageFeatures]:
        self.seen += [float(patches[0, 0]) for patches, _ in images]
        made = [torch.full((4, 8), float(patches[0, 0]), device=self.device) for patches, _ in images]
        return [ImageFeatures(each, (each + 0.25, each + 0.5)) for each in made]


def image(number: int) -> Image:
    return Image(0, 2, 2, f"image {number}", np.full((16, 6), number, np.float32))


def values(store: FeatureStore, *numbers: int) -> list[float]:
    found = store.get([image(number) for number in numbers])
    for each in found:
        assert all(
            torch.equal(part, each.embeddings_nH + more) for part, more in zip(each.added, (0.25, 0.5), strict=True)
        )
    return [float(each.embeddings_nH[0, 0]) for each in found]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])])
@pytest.mark.parametrize("model", ["qwen2.5-vl-tiny", "qwen3-vl-tiny", "qwen3.5-tiny"])
def test_patches_made_on_the_device_are_the_processors(model: str, device: str) -> None:
    processing = ImageProcessing.from_folder(hub.resolve(f"random://{model}").path)
    assert processing is not None
    on_device = DevicePatches(processing, torch.device(device))
    for height, width in ((64, 96), (224, 32), (100, 300)):
        size = processing.size_of(height, width)
        rgb_HW3 = np.random.default_rng(height).integers(0, 256, (*processing.pixels_of(size), 3), np.uint8)
        expected = processing.processor(images=[rgb_HW3], do_resize=False, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(on_device.make(ResizedImage(rgb_HW3)).cpu().numpy(), expected)
        np.testing.assert_array_equal(processing.patches_of(ResizedImage(rgb_HW3)), expected)


def test_a_processor_that_mixes_pixels_makes_its_patches_itself() -> None:
    processing = ImageProcessing.from_folder(hub.resolve("random://qwen3-vl-tiny").path)
    assert processing is not None

    class Blurring:
        merge_size, patch_size, temporal_patch_size = processing.merge, processing.patch, processing.times

        def __call__(self, images: Sequence[NDArray[np.uint8]], **settings: object) -> dict[str, NDArray[np.float32]]:
            mixed = images[0] // 2 + np.roll(images[0], 1, axis=0) // 3
            return dict(processing.processor(images=[mixed], **settings))

    blurring = ImageProcessing(Blurring())
    assert blurring.levels is None
    rgb_HW3 = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    mixed = ResizedImage(rgb_HW3 // 2 + np.roll(rgb_HW3, 1, axis=0) // 3)
    np.testing.assert_array_equal(blurring.patches_of(ResizedImage(rgb_HW3)), processing.patches_of(mixed))


def test_images_used_last_are_kept_within_the_limit() -> None:
    tower = CountingTower("cpu")
    store = FeatureStore(tower, None, device_bytes=0, host_bytes=2 * BYTES)  # type: ignore[arg-type]
    assert values(store, 1, 2) == [1, 2]
    assert values(store, 1, 3) == [1, 3]  # 2 leaves
    assert values(store, 1, 3, 2) == [1, 3, 2]
    assert tower.seen == [1, 2, 3, 2]
    assert (store.computed, store.reused) == (4, 3)
    assert [store.has(image(number)) for number in (1, 2, 3)] == [False, True, True]


def test_an_image_that_the_tower_fails_on_does_not_count() -> None:
    class FailingTower(CountingTower):
        def features(self, images: Sequence[tuple[FloatArray, tuple[int, int]]]) -> list[ImageFeatures]:
            raise torch.OutOfMemoryError

    store = FeatureStore(FailingTower("cpu"), None, device_bytes=0, host_bytes=BYTES)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        values(store, 1)
    assert store.computed == 0


def test_images_that_a_call_holds_stay_beyond_the_limit() -> None:
    tower = CountingTower("cpu")
    store = FeatureStore(tower, None, device_bytes=0, host_bytes=2 * BYTES)  # type: ignore[arg-type]
    values(store, 1)
    for _ in range(2):  # two calls at once, one between the steps of the other
        store.hold([image(1), image(4)])
    assert values(store, 2, 3, 4, 5) == [2, 3, 4, 5]
    store.release([image(1), image(4)])
    assert values(store, 6) == [6]
    assert [store.has(image(number)) for number in range(1, 7)] == [True, False, False, True, False, False]
    store.release([image(1), image(4)])
    assert values(store, 6) == [6]
    assert [store.has(image(number)) for number in (1, 4, 6)] == [False, True, True]
    assert not store._held


class SmallTower(CountingTower):
    """A tower that has too little memory for more than two images at once."""

    def features(self, images: Sequence[tuple[FloatArray, tuple[int, int]]]) -> list[ImageFeatures]:
        if len(images) > 2:
            raise torch.OutOfMemoryError
        return super().features(images)


def test_a_pass_that_is_too_large_for_the_device_is_split() -> None:
    tower = SmallTower("cpu")
    store = FeatureStore(tower, None, device_bytes=0, host_bytes=16 * BYTES)  # type: ignore[arg-type]
    assert values(store, *range(7)) == list(range(7))
    assert tower.seen == list(range(7))


def test_patches_are_made_for_the_part_that_the_tower_sees() -> None:
    """Patches on the device need memory too: where it is too little, fewer images are seen at once."""
    processing = ImageProcessing.from_folder(hub.resolve("random://qwen3-vl-tiny").path)
    assert processing is not None
    store = FeatureStore(tower := SmallTower("cpu"), processing, device_bytes=0, host_bytes=16 * BYTES)  # type: ignore[arg-type]
    alive: list[int] = []

    class FewPatches(DevicePatches):
        def make(self, resized: ResizedImage) -> torch.Tensor:
            if len(alive) == 2:
                alive.clear()
                raise torch.OutOfMemoryError
            alive.append(1)
            return super().make(resized)

    def features(images: Sequence[tuple[torch.Tensor, tuple[int, int]]]) -> list[ImageFeatures]:
        alive.clear()
        return SmallTower.features(tower, images)  # type: ignore[arg-type]

    store._device_patches = FewPatches(processing, tower.device)
    tower.features = features  # type: ignore[method-assign, assignment]
    shades = [10 * number for number in range(7)]
    drawn = [ResizedImage(np.full((64, 64, 3), shade, np.uint8)) for shade in shades]
    found = store.get([Image(0, 2, 2, f"shade {each.rgb_HW3[0, 0, 0]}", each) for each in drawn])
    expected = [float(processing.patches_of(each)[0, 0]) for each in drawn]
    assert [float(each.embeddings_nH[0, 0]) for each in found] == tower.seen == expected


def test_a_single_image_gets_the_memory_of_the_features() -> None:
    class FullTower(CountingTower):
        def features(self, images: Sequence[tuple[FloatArray, tuple[int, int]]]) -> list[ImageFeatures]:
            if store.has(image(1)):
                raise torch.OutOfMemoryError
            return super().features(images)

    store = FeatureStore(FullTower("cpu"), None, device_bytes=0, host_bytes=16 * BYTES)  # type: ignore[arg-type]
    assert values(store, 1) == [1]
    assert values(store, 2) == [2]
    assert not store.has(image(1))


def test_an_image_larger_than_the_limit_is_computed_each_time() -> None:
    tower = CountingTower("cpu")
    store = FeatureStore(tower, None, device_bytes=0, host_bytes=BYTES - 1)  # type: ignore[arg-type]
    assert values(store, 1) == values(store, 1) == [1]
    assert tower.seen == [1, 1]


@pytest.mark.gpu
@on_gpu
def test_features_leave_the_gpu_for_pinned_memory_and_come_back() -> None:
    tower = CountingTower("cuda")
    store = FeatureStore(tower, None, device_bytes=2 * BYTES, host_bytes=4 * BYTES)  # type: ignore[arg-type]
    for numbers in ((1, 2), (3, 4), (1, 2), (5, 6), (3, 4, 5)):
        assert values(store, *numbers) == list(numbers)
    assert tower.seen == [1, 2, 3, 4, 5, 6]
    assert store._device.nbytes <= 2 * BYTES
    assert store._host.nbytes <= 4 * BYTES
    held = store._host._kept.values()
    assert held
    assert all(each._pinned.embeddings_nH.is_pinned() for each in held)


@pytest.mark.gpu
@on_gpu
def test_features_that_come_back_on_another_stream_wait_for_their_copy() -> None:
    tower = CountingTower("cuda")
    store = FeatureStore(tower, None, device_bytes=0, host_bytes=64 * BYTES)  # type: ignore[arg-type]
    for number in range(32):
        torch.cuda._sleep(10_000_000)  # work of the stream, behind which the copy to the host waits
        store.get([image(number)])
        with torch.cuda.stream(torch.cuda.Stream()):
            assert values(store, number) == [number]
    assert len(tower.seen) == 32
