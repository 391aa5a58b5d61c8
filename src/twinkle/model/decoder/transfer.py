"""Asynchronous copies between host and device: the device computes while the host prepares the next batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, without waiting for a copy. Later work on the device sees the complete copy."""
    if device.type != "cuda":
        return tensor.to(device)
    # pin_memory copies into a tensor with the same strides. torch refuses that where elements share memory, as in an
    # expanded tensor.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class HostCopy:
    """An asynchronous copy to the host. Reading it waits for the copy, but not for work queued on the device later."""

    _tensor: Tensor
    _arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: Tensor) -> "HostCopy":
        """Start to copy a tensor to the host."""
        if not tensor.is_cuda:
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(tensor.device))
        return cls(host, arrived)

    def array(self) -> np.ndarray:
        """Wait for the copy, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.numpy().copy()  # a copy, because pinned memory is scarce and should be freed soon
