"""Descriptions of device groups and meshes. A server does not use them: it has its own."""

from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np

from twinkle_client.errors import InvalidRequestError, invalid
from twinkle_client.infra.platform import CPU, Platform

__all__ = ["DeviceGroup", "DeviceMesh"]

_DIMENSIONS = ("fsdp", "pp", "dp", "cp", "tp", "ep", "ep_fsdp")


@dataclass(frozen=True)
class DeviceGroup:
    """A named group of devices, with the fields of the library's class. ``initialize`` accepts it and says in the log
    that the server decides on which devices it computes."""

    name: str
    ranks: list[int] | int
    device_type: str
    gpus_per_worker: int = 1
    visible_devices: str | list[int] | None = None

    def __post_init__(self) -> None:
        count = self.ranks if isinstance(self.ranks, int) else len(self.ranks)
        if count < 1 or (isinstance(self.ranks, list) and min(self.ranks) < 0):
            raise invalid(f"ranks of group {self.name!r}", self.ranks, "a number ≥ 1 or a list of ranks ≥ 0")
        if self.gpus_per_worker < 1 or count % self.gpus_per_worker:
            allowed = f"a number that divides the group's {count} ranks"
            raise invalid(f"gpus_per_worker of group {self.name!r}", self.gpus_per_worker, allowed)
        if self.platform is CPU and self.gpus_per_worker != 1:
            raise invalid(f"gpus_per_worker of group {self.name!r}", self.gpus_per_worker, "1 for CPU")

    @property
    def platform(self) -> type[Platform]:
        return Platform.get_platform(self.device_type)


@dataclass(frozen=True, eq=False)
class DeviceMesh:
    """Ranks in an array with one named dimension for each kind of parallelism, with the fields of the library's class.

    Models and loaders accept it and say in the log that the server has its own mesh. For the script's own arithmetic it
    answers as the library's does in a program without a launcher: this process has data rank 0 and no other rank.
    """

    mesh: np.ndarray
    mesh_dim_names: tuple[str, ...] | None = None
    ep_size: int | None = None
    etp_size: int | None = None
    ep_fsdp_size: int | None = None
    vpp_size: int | None = None
    ulysses_size: int | None = None
    sequence_parallel: bool = False
    device_type: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", np.array(self.mesh, dtype=np.int64))
        if self.device_type is None:
            object.__setattr__(self, "device_type", Platform.device_prefix())
        names = self.mesh_dim_names
        if names is None:
            return
        object.__setattr__(self, "mesh_dim_names", tuple(names))
        if len(names) != self.mesh.ndim or len(set(names)) != len(names) or not set(names) <= set(_DIMENSIONS):
            allowed = f"{self.mesh.ndim} different names among {', '.join(_DIMENSIONS)}"
            raise invalid("mesh_dim_names", names, allowed)
        rows = max(1, self.dp_world_size) * max(1, self.fsdp_world_size)
        if rows % (self.ulysses_size or 1):
            raise invalid("ulysses_size", self.ulysses_size, f"a divisor of dp × fsdp, which is {rows}")

    @staticmethod
    def from_sizes(
        *,
        world_size: int = 1,
        dp_size: int | None = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        ulysses_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int | None = 1,
        ep_fsdp_size: int | None = None,
        vpp_size: int | None = None,
        device_type: str | None = None,
        sequence_parallel: bool = False,
    ) -> "DeviceMesh":
        """Return a mesh of the given sizes, in the order fsdp, pp, dp, cp, tp with tp varying fastest.

        Dimensions without a size are absent, except dp, which then has size 1. A ``world_size`` other than 1 must
        equal the product of the sizes; 1 means that it is not checked.
        """
        given = {"fsdp": fsdp_size, "pp": pp_size, "dp": dp_size or 1, "cp": cp_size, "tp": tp_size}
        sizes = {name: size for name, size in given.items() if size is not None}
        others = {"ulysses": ulysses_size, "ep": ep_size, "etp": etp_size, "ep_fsdp": ep_fsdp_size, "vpp": vpp_size}
        for name, size in {**given, **others}.items():
            if size is not None and size < 1:
                raise invalid(f"{name}_size", size, "a number ≥ 1")
        ranks = prod(sizes.values())
        if world_size not in (1, ranks):
            shape = " × ".join(f"{name} {size}" for name, size in sizes.items())
            raise invalid("world_size", world_size, f"{ranks}, which is {shape}")
        if ep_size is not None and ranks % ep_size:
            raise invalid("ep_size", ep_size, f"a divisor of the world size {ranks}")
        if ep_size is not None and ep_size > 1 and ep_fsdp_size is None:
            ep_fsdp_size = ranks // ep_size
        return DeviceMesh(
            np.arange(ranks).reshape(tuple(sizes.values())),
            tuple(sizes),
            ep_size=ep_size,
            etp_size=etp_size,
            ep_fsdp_size=ep_fsdp_size,
            vpp_size=vpp_size,
            ulysses_size=ulysses_size,
            sequence_parallel=sequence_parallel,
            device_type=device_type,
        )

    # --- dimensions ---------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return int(self.mesh.size)

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1

    @property
    def order(self) -> str:
        """Return Megatron's name for the order of dimensions, the fastest first."""
        return "tp-cp-ep-dp-pp"

    def has_dim(self, name: str) -> bool:
        return name in (self.mesh_dim_names or ())

    def get_dim_size(self, name: str) -> int:
        if not self.has_dim(name):
            raise invalid("dimension", name, ", ".join(self.mesh_dim_names or ("none: this mesh has no names",)))
        return int(self.mesh.shape[(self.mesh_dim_names or ()).index(name)])

    @property
    def dp_world_size(self) -> int:
        """Return the size of dp, or 0 if the mesh has no such dimension. The same goes for fsdp, tp, pp, cp and ep."""
        return self._size_or_zero("dp")

    @property
    def fsdp_world_size(self) -> int:
        return self._size_or_zero("fsdp")

    @property
    def tp_world_size(self) -> int:
        return self._size_or_zero("tp")

    @property
    def pp_world_size(self) -> int:
        return self._size_or_zero("pp")

    @property
    def cp_world_size(self) -> int:
        return self._size_or_zero("cp")

    @property
    def ep_world_size(self) -> int:
        return self._size_or_zero("ep")

    @property
    def etp_world_size(self) -> int:
        return self.etp_size or self.tp_world_size or 1

    # --- rows of a batch ----------------------------------------------------------------------------------------------

    @property
    def data_world_size(self) -> int:
        """Return into how many parts a batch is divided."""
        return max(1, max(1, self.dp_world_size) * max(1, self.fsdp_world_size) // (self.ulysses_size or 1))

    @property
    def data_rank(self) -> int:
        return 0

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """Return the contiguous part of ``total_length`` items that a data rank gets (default: rank 0).

        If the items do not divide evenly, the first data ranks get one more each.
        """
        data_rank = self.data_rank if rank is None else rank
        size, extra = divmod(total_length, self.data_world_size)
        start = data_rank * size + min(data_rank, extra)
        return slice(start, start + size + (data_rank < extra))

    # --- torch.distributed --------------------------------------------------------------------------------------------

    def create_process_group(self, dims: Any) -> NoReturn:
        raise _no_processes("create_process_group")

    def get_dim_group(self, dims: Any) -> NoReturn:
        raise _no_processes("get_dim_group")

    def to_torch_device_mesh(self) -> NoReturn:
        raise _no_processes("to_torch_device_mesh")

    def _size_or_zero(self, name: str) -> int:
        return self.get_dim_size(name) if self.has_dim(name) else 0


def _no_processes(method: str) -> InvalidRequestError:
    return InvalidRequestError(f"{method}: a script on a server is one process; the server's processes are its own")
