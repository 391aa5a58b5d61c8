"""Seed Python, numpy and torch at once, and use torch's devices of any kind.

Scripts use it as ``twinkle.framework_util.seed_everything()``. Torch is imported when a function needs it;
``is_torch_available``, ``is_gpu_available`` and ``is_npu_available`` return False if it is not installed.
"""

import random
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from twinkle.environment import read_launch
from twinkle.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

__all__ = [
    "contains_nan",
    "device_rng_state",
    "empty_cache",
    "gather_object",
    "get_current_device",
    "get_device",
    "ipc_collect",
    "is_gpu_available",
    "is_npu_available",
    "is_torch_available",
    "is_torch_npu_available",
    "seed_everything",
    "set_device",
    "set_device_rng_state",
    "synchronize",
    "to_local_tensor",
]

_LARGEST_SEED = 2**32 - 1  # the largest that numpy accepts


def seed_everything(seed: int = 42, full_determinism: bool = False) -> None:
    """Seed Python, numpy and, where it is installed, torch on all devices.

    ``full_determinism`` also makes torch choose deterministic kernels, and warn where there is none. cuBLAS reads its
    workspace setting when CUDA starts: start the process with CUBLAS_WORKSPACE_CONFIG=:16:8.
    """
    if not 0 <= seed <= _LARGEST_SEED:
        raise InvalidInputError("seed", seed, f"an integer from 0 to {_LARGEST_SEED}")
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    if find_spec("torch") is not None:
        _seed_torch(seed, full_determinism)


def _seed_torch(seed: int, full_determinism: bool) -> None:
    import torch

    torch.manual_seed(seed)  # all devices
    if full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def device_rng_state(device_type: str) -> Any:
    """Return the state of this process's random generator on ``device_type``, a tensor; None without such a device."""
    import torch

    if device_type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device_type)
    return module.get_rng_state() if module.is_available() else None


def set_device_rng_state(device_type: str, state: Any) -> None:
    import torch

    if device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device_type).set_rng_state(state)


# --- what is installed ------------------------------------------------------------------------------------------------


def is_torch_available() -> bool:
    return find_spec("torch") is not None


def is_torch_npu_available() -> bool:
    return find_spec("torch_npu") is not None


def is_gpu_available() -> bool:
    """Return whether torch can compute on a CUDA device."""
    if not is_torch_available():
        return False
    import torch

    return torch.cuda.is_available()


def is_npu_available() -> bool:
    """Return whether torch can compute on an Ascend device."""
    if not is_torch_available() or not is_torch_npu_available():
        return False
    import torch

    return bool(torch.get_device_module("npu").is_available())


# --- the devices of this process --------------------------------------------------------------------------------------


def get_device(local_rank: int) -> str:
    """Return the name of the device with this number, such as ``cuda:0``; ``cpu`` without an accelerator."""
    kind = _accelerator()
    return "cpu" if kind is None else "mps" if kind == "mps" else f"{kind}:{local_rank}"


def get_current_device() -> str:
    """Return the name of the device that torch uses by default."""
    import torch

    return get_device(0 if _accelerator() is None else torch.accelerator.current_device_index())


def set_device(local_rank: int | None = None) -> None:
    """Set torch's current device, by default that of this process's local rank. No effect without an accelerator."""
    import torch

    if _accelerator() is not None:
        torch.accelerator.set_device_index(max(0, read_launch().local_rank) if local_rank is None else local_rank)


def synchronize() -> None:
    """Wait until the device has finished all work submitted so far."""
    import torch

    if _accelerator() is not None:
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Release the memory that torch caches to the device."""
    import torch

    kind = _accelerator()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


def ipc_collect() -> None:
    """Free CUDA memory that was shared with other processes and that they have released."""
    import torch

    if is_gpu_available():
        torch.cuda.ipc_collect()


def _accelerator() -> str | None:
    """Return the type of the accelerator (cuda, npu, mps, …); None if there is none."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


# --- tensors and processes --------------------------------------------------------------------------------------------


def to_local_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a sharded tensor (DTensor) as one whole tensor; all processes must call it. Return others unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def contains_nan(*values: Any, **named: Any) -> bool:
    """Return whether a tensor among the arguments, also inside lists, tuples and mappings, holds NaN."""
    import torch

    for value in (*values, *named.values()):
        if isinstance(value, torch.Tensor):
            found = bool(value.isnan().any())
        elif isinstance(value, Mapping):
            found = contains_nan(*value.values())
        else:
            found = isinstance(value, list | tuple) and contains_nan(*value)
        if found:
            return True
    return False


def gather_object(obj: Any, device_mesh: Any = None, process_group: Any = None) -> list[Any]:
    """Return the objects of all processes of the group in one list, without None; lists and tuples are joined.

    device_mesh: if it has one rank, nothing is gathered from other processes. process_group: None means all processes.
    """
    import torch.distributed as dist

    alone = not dist.is_initialized() or (device_mesh is not None and device_mesh.world_size == 1)
    held: list[Any] = [obj]
    if not alone:
        held = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(held, obj, group=process_group)
    spread = [each if isinstance(each, list | tuple) else [each] for each in held]
    return [item for each in spread for item in each if item is not None]
