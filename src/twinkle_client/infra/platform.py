"""The kinds of device that the client's machine can have. The server computes on its own."""

import shutil
import sys
from typing import ClassVar

from twinkle_client.errors import invalid

__all__ = ["CPU", "GPU", "MPS", "NPU", "Platform", "is_master"]


class Platform:
    """A kind of device. Methods take its name (``"GPU"``, ``"CUDA"``, ``"NPU"``, ``"MPS"``, ``"CPU"``, in any case);
    None means the kind that the client's machine has.

    The client is one process, whose rank is −1, as of a local program without a launcher.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    visible_variable: ClassVar[str]  # empty: there is only one device
    backend: ClassVar[str]

    @staticmethod
    def get_platform(platform: str | None = None) -> "type[Platform]":
        name = _found_here() if platform is None else platform.upper()
        if name not in _PLATFORMS:
            raise invalid("platform", platform, ", ".join(_PLATFORMS))
        return _PLATFORMS[name]

    @staticmethod
    def get_platform_names() -> list[str]:
        return ["GPU", "NPU", "MPS", "CPU"]

    @staticmethod
    def visible_device_env(platform: str | None = None) -> str | None:
        """Return the variable that limits a process to some devices; None if this platform has none."""
        return Platform.get_platform(platform).visible_variable or None

    @staticmethod
    def device_prefix(platform: str | None = None) -> str:
        """Return torch's name of the device type, such as ``cuda``."""
        return Platform.get_platform(platform).prefix

    @staticmethod
    def get_local_device(idx: int | None = None, *, platform: str | None = None) -> str:
        """Return torch's name of a device of the client's machine, such as ``cuda:0``; by default its first."""
        found = Platform.get_platform(platform)
        return f"{found.prefix}:{idx or 0}" if found.visible_variable else found.prefix

    @staticmethod
    def device_backend(platform: str | None = None) -> str:
        """Return the name of the torch.distributed backend."""
        return Platform.get_platform(platform).backend

    @staticmethod
    def get_rank() -> int:
        return -1

    @staticmethod
    def get_local_rank() -> int:
        return -1

    @staticmethod
    def get_world_size() -> int:
        return 1

    @staticmethod
    def get_local_world_size() -> int:
        return 1

    @staticmethod
    def get_nnodes() -> int:
        return 1

    @staticmethod
    def get_node_rank() -> int:
        return 0

    @staticmethod
    def is_local_master() -> bool:
        return True

    @staticmethod
    def is_master() -> bool:
        return True

    @staticmethod
    def is_last_rank() -> bool:
        return True

    @staticmethod
    def get_peer_index(target_size: int, rank: int | None = None, world_size: int | None = None) -> slice:
        """Return which of ``target_size`` items belong to a rank: a contiguous part; by default all of them."""
        rank, world_size = rank or 0, world_size or 1
        if target_size < world_size:
            return slice(rank % target_size, rank % target_size + 1)
        size, extra = divmod(target_size, world_size)
        start = rank * size + min(rank, extra)
        return slice(start, start + size + (rank < extra))


class GPU(Platform):
    """NVIDIA GPUs."""

    name = "GPU"
    prefix = "cuda"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    backend = "nccl"


class NPU(Platform):
    """Ascend NPUs."""

    name = "NPU"
    prefix = "npu"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    backend = "hccl"


class MPS(Platform):
    """Apple GPUs."""

    name = "MPS"
    prefix = "mps"
    visible_variable = ""
    backend = "gloo"


class CPU(Platform):
    """The CPU: no accelerator."""

    name = "CPU"
    prefix = "cpu"
    visible_variable = ""
    backend = "gloo"


_PLATFORMS: dict[str, type[Platform]] = {"GPU": GPU, "CUDA": GPU, "NPU": NPU, "MPS": MPS, "CPU": CPU}


def is_master() -> bool:
    """Return True: the client is one process."""
    return True


def _found_here() -> str:
    """Return the platform of this machine, found by the driver's command line tool."""
    for platform, tool in ((NPU, "npu-smi"), (GPU, "nvidia-smi")):
        if shutil.which(tool):
            return platform.name
    return "MPS" if sys.platform == "darwin" else "CPU"
