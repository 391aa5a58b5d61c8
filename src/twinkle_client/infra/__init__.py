"""Devices and processes, as local scripts describe them. On a server they are the server's decision.

The client itself is one process: ranks and sizes of this package are those of a program without a launcher.
"""

from twinkle_client.compatibility import PATHS, missing
from twinkle_client.infra.device_mesh import DeviceGroup, DeviceMesh
from twinkle_client.infra.platform import CPU, GPU, MPS, NPU, Platform, is_master

__all__ = ["CPU", "GPU", "MPS", "NPU", "DeviceGroup", "DeviceMesh", "Platform", "is_master"]


def __getattr__(name: str) -> object:
    raise missing(PATHS, __name__, name)
