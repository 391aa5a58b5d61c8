"""The kinds of device a process can run on, and which process this is among those that were launched together."""

import shutil
import sys
from typing import Any, ClassVar

from twinkle.environment import hides_devices, read_launch, set_variable_defaults
from twinkle.errors import InvalidInputError
from twinkle.framework_util import device_rng_state, set_device_rng_state

__all__ = ["CPU", "GPU", "MPS", "NPU", "Platform", "ensure_hccl_socket_env", "is_master"]


class Platform:
    """A kind of device. Methods take its name (``"GPU"``, ``"CUDA"``, ``"NPU"``, ``"MPS"``, ``"CPU"``, in any case);
    None is the kind that this machine has."""

    name: ClassVar[str]
    prefix: ClassVar[str]
    visible_variable: ClassVar[str]  # empty: there is only one device
    backend: ClassVar[str]

    @staticmethod
    def get_platform(platform: str | None = None) -> "type[Platform]":
        name = _found_here() if platform is None else platform.upper()
        if name not in _PLATFORMS:
            raise InvalidInputError("platform", platform, ", ".join(_PLATFORMS))
        return _PLATFORMS[name]

    @staticmethod
    def get_platform_names() -> list[str]:
        return ["GPU", "NPU", "MPS", "CPU"]

    @staticmethod
    def visible_device_env(platform: str | None = None) -> str | None:
        """The variable that limits a process to some devices; None where there is none."""
        return Platform.get_platform(platform).visible_variable or None

    @staticmethod
    def device_prefix(platform: str | None = None) -> str:
        """torch's name of the device type."""
        return Platform.get_platform(platform).prefix

    @staticmethod
    def get_local_device(idx: int | None = None, *, platform: str | None = None) -> str:
        """torch's name of a device: that of this process's local rank, if no number is given."""
        found = Platform.get_platform(platform)
        if not found.visible_variable:
            return found.prefix
        return f"{found.prefix}:{max(0, read_launch().local_rank if idx is None else idx)}"

    @staticmethod
    def device_backend(platform: str | None = None) -> str:
        """torch.distributed's backend."""
        return Platform.get_platform(platform).backend

    @staticmethod
    def get_rank() -> int:
        """−1: this process was not launched with others."""
        return read_launch().rank

    @staticmethod
    def get_local_rank() -> int:
        return read_launch().local_rank

    @staticmethod
    def get_world_size() -> int:
        return read_launch().world_size

    @staticmethod
    def get_local_world_size() -> int:
        return read_launch().local_world_size

    @staticmethod
    def get_nnodes() -> int:
        return read_launch().nodes

    @staticmethod
    def get_node_rank() -> int:
        return read_launch().node_rank

    @staticmethod
    def is_local_master() -> bool:
        return read_launch().local_rank in (-1, 0)

    @staticmethod
    def is_master() -> bool:
        return read_launch().rank in (-1, 0)

    @staticmethod
    def is_last_rank() -> bool:
        launch = read_launch()
        return launch.rank in (-1, launch.world_size - 1)

    @staticmethod
    def get_peer_index(target_size: int, rank: int | None = None, world_size: int | None = None) -> slice:
        """Which of ``target_size`` things belong to this process: a contiguous part of all, evenly cut.

        With fewer things than processes several share one.
        """
        launch = read_launch()
        rank = max(0, launch.rank) if rank is None else rank
        world_size = launch.world_size if world_size is None else world_size
        if target_size < world_size:
            return slice(rank % target_size, rank % target_size + 1)
        size, extra = divmod(target_size, world_size)
        start = rank * size + min(rank, extra)
        return slice(start, start + size + (rank < extra))

    @staticmethod
    def get_device_rng_state(platform: str | None = None) -> Any:
        """The state of the device's random numbers, a tensor; None where the device is not there."""
        return device_rng_state(Platform.device_prefix(platform))

    @staticmethod
    def set_device_rng_state(state: Any, *, platform: str | None = None) -> None:
        """Give back what :meth:`get_device_rng_state` returned; None changes nothing."""
        if state is not None:
            set_device_rng_state(Platform.device_prefix(platform), state)


class GPU(Platform):
    """NVIDIA's."""

    name = "GPU"
    prefix = "cuda"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    backend = "nccl"


class NPU(Platform):
    """Ascend's."""

    name = "NPU"
    prefix = "npu"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    backend = "hccl"


class MPS(Platform):
    """Apple's."""

    name = "MPS"
    prefix = "mps"
    visible_variable = ""
    backend = "gloo"


class CPU(Platform):
    """No accelerator."""

    name = "CPU"
    prefix = "cpu"
    visible_variable = ""
    backend = "gloo"


_PLATFORMS: dict[str, type[Platform]] = {"GPU": GPU, "CUDA": GPU, "NPU": NPU, "MPS": MPS, "CPU": CPU}


def is_master() -> bool:
    """Whether this process is the first of all, or the only one."""
    return Platform.is_master()


def ensure_hccl_socket_env(master_port: int) -> None:
    """Give a job of several its own ports on shared machines, derived from its master port, unless they are set."""
    base = master_port % 8000
    set_variable_defaults(
        {
            "HCCL_IF_BASE_PORT": str(20000 + (master_port + 997) % 20000),
            "HCCL_HOST_SOCKET_PORT_RANGE": f"{40000 + base}-{40000 + base + 511}",
            "HCCL_NPU_SOCKET_PORT_RANGE": f"{50000 + base}-{50000 + base + 511}",
        }
    )


def _found_here() -> str:
    """By the driver's tool, which is there without torch; asking torch would load it."""
    for platform, tool in ((NPU, "npu-smi"), (GPU, "nvidia-smi")):
        if shutil.which(tool) and not hides_devices(platform.visible_variable):
            return platform.name
    return "MPS" if sys.platform == "darwin" else "CPU"
