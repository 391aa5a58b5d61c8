"""Compatibility path: scripts import functions of :mod:`twinkle.framework_util` from ``twinkle.torch_util``."""

from twinkle.framework_util import (
    contains_nan,
    empty_cache,
    gather_object,
    get_current_device,
    get_device,
    ipc_collect,
    is_gpu_available,
    is_npu_available,
    is_torch_available,
    is_torch_npu_available,
    seed_everything,
    set_device,
    synchronize,
    to_local_tensor,
)

__all__ = [
    "contains_nan",
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
    "synchronize",
    "to_local_tensor",
]
