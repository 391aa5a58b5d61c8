"""A tensor in host memory that says it is on a GPU, and counts how often something waits for the device."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # torch asks no driver for this device; the numbers are in host memory
WAITING = ("masked_select", "nonzero")  # the size of their result is known only after they have run


class DeviceTensor(Tensor):
    """``waits`` counts transfers to the host, reading of numbers, and operations whose result has an unknown size."""

    waits: ClassVar[int] = 0
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=DEVICE, strides=held.stride())

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        place = options.pop("device", None)
        leaves = place is not None and torch.device(place).type == "cpu"
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        DeviceTensor.waits += leaves or by_mask or name in WAITING
        held_args, held_options = tree_map(_held, (args, options))
        result = func(*held_args, **held_options)
        return result if leaves else tree_map(lambda each: cls(each) if isinstance(each, Tensor) else each, result)

    def item(self) -> Any:
        DeviceTensor.waits += 1
        return self.held.item()

    def tolist(self) -> Any:
        DeviceTensor.waits += 1
        return self.held.tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value
