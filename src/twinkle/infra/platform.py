"""The kinds of device that a process can run on, and the rank of this process among all processes of its launch."""

import shutil
import sys
from collections.abc import MutableMapping
from typing import Any, ClassVar

from twinkle.environment import hides_devices, read_launch, set_variable_defaults
from twinkle.errors import InvalidInputError
from twinkle.framework_util import device_rng_state, set_device_rng_state

__all__ = ["CPU", "GPU", "MPS", "NPU", "Platform", "ensure_hccl_socket_env", "is_last_rank", "is_master"]


class Platform:
    """A kind of device. Methods take its name (``"GPU"``, ``"CUDA"``, ``"NPU"``, ``"MPS"``, ``"CPU"``, in any case);
    None means the kind that this machine has."""

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
        """Return the variable that limits a process to some devices; None if this platform has none."""
        return Platform.get_platform(platform).visible_variable or None

    @staticmethod
    def device_prefix(platform: str | None = None) -> str:
        """Return torch's name of the device type, such as ``cuda``."""
        return Platform.get_platform(platform).prefix

    @staticmethod
    def get_local_device(idx: int | None = None, *, platform: str | None = None) -> str:
        """Return torch's name of a device, such as ``cuda:0``; by default the device of this process's local rank."""
        found = Platform.get_platform(platform)
        if not found.visible_variable:
            return found.prefix
        return f"{found.prefix}:{max(0, read_launch().local_rank if idx is None else idx)}"

    @staticmethod
    def device_backend(platform: str | None = None) -> str:
        """Return the name of the torch.distributed backend."""
        return Platform.get_platform(platform).backend

    @staticmethod
    def get_rank() -> int:
        """Return this process's rank; −1 if it was not started by a launcher."""
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
        """Return which of ``target_size`` items belong to this process: a contiguous part, with all parts about equal.

        If there are fewer items than processes, several processes share one item.
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
        """Return the state of the device's random generator, a tensor; None if the device does not exist."""
        return device_rng_state(Platform.device_prefix(platform))

    @staticmethod
    def set_device_rng_state(state: Any, *, platform: str | None = None) -> None:
        """Restore a state that :meth:`get_device_rng_state` returned; None changes nothing."""
        if state is not None:
            set_device_rng_state(Platform.device_prefix(platform), state)


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
    """Return whether this process is the first of its launch, or the only one."""
    return Platform.is_master()


def is_last_rank() -> bool:
    """Return whether this process is the last of its launch, or the only one."""
    return Platform.is_last_rank()


def ensure_hccl_socket_env(master_port: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Set HCCL's port variables, unless they are set, to ports derived from the job's master port.

    So several jobs can share a machine without using the same ports. ``environ``: the variables of another process,
    by default those of this one.
    """
    base = master_port % 8000
    variables = {
        "HCCL_IF_BASE_PORT": str(20000 + (master_port + 997) % 20000),
        "HCCL_HOST_SOCKET_PORT_RANGE": f"{40000 + base}-{40000 + base + 511}",
        "HCCL_NPU_SOCKET_PORT_RANGE": f"{50000 + base}-{50000 + base + 511}",
    }
    if environ is None:
        set_variable_defaults(variables)
        return
    for name, value in variables.items():
        environ.setdefault(name, value)


def _found_here() -> str:
    """Return the platform of this machine, found by the driver's command line tool: asking torch would import it."""
    for platform, tool in ((NPU, "npu-smi"), (GPU, "nvidia-smi")):
        if shutil.which(tool) and not hides_devices(platform.visible_variable):
            return platform.name
    return "MPS" if sys.platform == "darwin" else "CPU"
