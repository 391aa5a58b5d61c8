"""Compatibility path: scripts import these names from ``twinkle.utils``. They live elsewhere."""

from twinkle import framework_util, torch_util
from twinkle.infra import GPU, MPS, NPU, DeviceGroup, DeviceMesh, Platform, is_master
from twinkle.logger import get_logger
from twinkle.network import find_free_port, find_node_ip
from twinkle.plugin import Plugin
from twinkle.remote_code import check_unsafe, trust_remote_code
from twinkle.requirements import exists, requires

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
