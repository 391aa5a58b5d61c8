"""Small utilities for all packages: logging, ports, optional packages, and the check whether remote code is trusted.

Scripts import these names, and some that are defined in other packages, from here. Each is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle.compatibility import missing

if TYPE_CHECKING:
    from twinkle import framework_util, torch_util
    from twinkle.hub.plugin import Plugin
    from twinkle.infra import GPU, MPS, NPU, DeviceGroup, DeviceMesh, Platform, is_master
    from twinkle.utils.logger import get_logger
    from twinkle.utils.network import find_free_port, find_node_ip
    from twinkle.utils.requirements import exists, requires
    from twinkle.utils.unsafe import check_unsafe, trust_remote_code

__all__ = [
    "GPU",
    "MPS",
    "NPU",
    "DeviceGroup",
    "DeviceMesh",
    "Platform",
    "Plugin",
    "check_unsafe",
    "exists",
    "find_free_port",
    "find_node_ip",
    "framework_util",
    "get_logger",
    "is_master",
    "requires",
    "torch_util",
    "trust_remote_code",
]

_HOME = {
    "Plugin": "hub.plugin",
    "check_unsafe": "utils.unsafe",
    "exists": "utils.requirements",
    "find_free_port": "utils.network",
    "find_node_ip": "utils.network",
    "get_logger": "utils.logger",
    "requires": "utils.requirements",
    "trust_remote_code": "utils.unsafe",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise missing(__name__, name)
    if name in ("framework_util", "torch_util"):
        return import_module(f"twinkle.{name}")
    return getattr(import_module(f"twinkle.{_HOME.get(name, 'infra')}"), name)
