"""How a program runs: its mode, seed and devices, and how its processes share the work.

Ray and torch are imported when they are first used.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load
from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.drawing import get_device_placement
from twinkle.infra.initialization import (
    Settings,
    adapter_seed,
    current_seed,
    current_settings,
    initialize,
    process_lock,
    shutdown,
)
from twinkle.infra.lazy_result import LazyResult
from twinkle.infra.platform import CPU, GPU, MPS, NPU, Platform, is_master
from twinkle.infra.remote import driver_function, remote_class, remote_function

if TYPE_CHECKING:
    from twinkle.infra.tensor_collect import collect_tensor_dict

__all__ = [
    "CPU",
    "GPU",
    "MPS",
    "NPU",
    "DeviceGroup",
    "DeviceMesh",
    "LazyResult",
    "Platform",
    "Settings",
    "adapter_seed",
    "collect_tensor_dict",
    "current_seed",
    "current_settings",
    "driver_function",
    "get_device_placement",
    "initialize",
    "is_master",
    "process_lock",
    "remote_class",
    "remote_function",
    "shutdown",
]


def __getattr__(name: str) -> object:
    if name != "collect_tensor_dict":  # imported on first use, because it needs torch
        return find_name(__name__, name)
    return load("twinkle.infra.tensor_collect", name)
