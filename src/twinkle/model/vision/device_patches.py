"""Makes the patches of resized images on the device, with the bits of the image processor.

Patches take eight times the memory of the bytes that travel instead, and a host takes milliseconds for each image.
"""

import torch
from torch import Tensor

from twinkle.images import ImageProcessing, ResizedImage


class DevicePatches:
    """The patches of images for one model, from a table of the numbers that each byte of each colour becomes."""

    def __init__(self, processing: ImageProcessing, device: torch.device) -> None:
        """``processing``: one that has such a table."""
        assert processing.levels is not None, "asked for before"
        self._levels = torch.from_numpy(processing.levels).flatten().to(device)
        self._first_3 = 256 * torch.arange(3, dtype=torch.int32, device=device)  # the place of each colour's numbers
        self._merge, self._patch, self._times = processing.merge, processing.patch, processing.times

    def make(self, resized: ResizedImage) -> Tensor:
        """Return what :meth:`ImageProcessing.patches_of` returns, on the device. The host does not wait for it."""
        bytes_HW3 = torch.from_numpy(resized.rgb_HW3.copy())
        if self._levels.is_cuda:
            bytes_HW3 = bytes_HW3.pin_memory()
        places_HW3 = bytes_HW3.to(self._levels.device, non_blocking=True).int() + self._first_3
        merge, patch = self._merge, self._patch
        rows, columns = (length // (merge * patch) for length in places_HW3.shape[:2])
        # (rows, columns) of squares, each of (merge, merge) patches of (3, time, patch, patch); all times are equal
        squares = places_HW3.view(rows, merge, patch, columns, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
        numbers = self._levels.index_select(0, squares.flatten()).view(-1, 3, 1, patch, patch)
        return numbers.expand(-1, -1, self._times, -1, -1).flatten(1)
