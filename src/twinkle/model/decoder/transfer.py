"""Between host and device without waiting: the device works on while the host prepares the next batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that is complete for everything that the device is given after it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class HostCopy:
    """A copy to the host under way; reading it waits for what the device did before, not for what it does after."""

    _tensor: Tensor
    _arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, tensor: Tensor) -> "HostCopy":
        if not tensor.is_cuda:
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(tensor.device))
        return cls(host, arrived)

    def array(self) -> np.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.numpy().copy()  # pinned memory is scarce: nobody should hold on to it
