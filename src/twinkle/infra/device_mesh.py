"""The device mesh: how ranks are arranged along the dimensions of parallelism, and this process's place among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle.environment import read_launch
from twinkle.errors import InvalidInputError
from twinkle.infra.platform import Platform

if TYPE_CHECKING:
    import torch.distributed.device_mesh

__all__ = ["DeviceMesh"]

_DIMENSIONS = ("fsdp", "pp", "dp", "cp", "tp", "ep", "ep_fsdp")


@dataclass(frozen=True, eq=False)
class DeviceMesh:
    """Ranks in an array with one named dimension for each kind of parallelism.

    dp and fsdp divide the rows of a batch (``data_rank`` of ``data_world_size``); pp divides the layers, tp the
    matrices inside a layer, cp and ulysses the sequence. Ranks that differ only along pp, tp, cp or ulysses work on the
    same rows. ``ep_size``, ``etp_size``, ``ep_fsdp_size``, ``vpp_size`` and ``ulysses_size`` describe how the ranks of
    the other dimensions are used, and add no dimension. Of the ranks along dp and fsdp, each ``ulysses_size``
    neighbours (fsdp varies fastest) are a sequence group: they get the same rows, and each computes a part of them.

    The place of this process is computed from its RANK at each call. If there are fewer processes than ranks
    (``gpus_per_worker`` > 1), process r has the n = ranks / processes ranks from r · n on; r · n is its own rank.
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
            raise InvalidInputError("mesh_dim_names", names, allowed)
        rows = max(1, self.dp_world_size) * max(1, self.fsdp_world_size)
        if rows % (self.ulysses_size or 1):
            raise InvalidInputError("ulysses_size", self.ulysses_size, f"a divisor of dp × fsdp, which is {rows}")

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
                raise InvalidInputError(f"{name}_size", size, "a number ≥ 1")
        ranks = prod(sizes.values())
        if world_size not in (1, ranks):
            shape = " × ".join(f"{name} {size}" for name, size in sizes.items())
            raise InvalidInputError("world_size", world_size, f"{ranks}, which is {shape}")
        if ep_size is not None and ranks % ep_size:
            raise InvalidInputError("ep_size", ep_size, f"a divisor of the world size {ranks}")
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
        return self.world_size == 1 and read_launch().rank < 0

    @property
    def order(self) -> str:
        """Return Megatron's name for the order of dimensions, the fastest first."""
        return "tp-cp-ep-dp-pp"

    def has_dim(self, name: str) -> bool:
        return name in (self.mesh_dim_names or ())

    def get_dim_size(self, name: str) -> int:
        if not self.has_dim(name):
            raise InvalidInputError(
                "dimension", name, ", ".join(self.mesh_dim_names or ("none: this mesh has no names",))
            )
        return int(self.mesh.shape[self._axis(name)])

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

    # --- this process -------------------------------------------------------------------------------------------------

    @property
    def dp_rank(self) -> int | None:
        """Return this process's index along dp.

        None if the mesh has no dp, or this process is not in the mesh or was not started by a launcher.

        The ranks along fsdp, tp, pp, cp and ep follow the same rule.
        """
        return self._own_coordinate("dp")

    @property
    def fsdp_rank(self) -> int | None:
        return self._own_coordinate("fsdp")

    @property
    def tp_rank(self) -> int | None:
        return self._own_coordinate("tp")

    @property
    def pp_rank(self) -> int | None:
        return self._own_coordinate("pp")

    @property
    def cp_rank(self) -> int | None:
        return self._own_coordinate("cp")

    @property
    def ep_rank(self) -> int | None:
        return self._own_coordinate("ep")

    # --- rows of a batch ----------------------------------------------------------------------------------------------

    @property
    def data_world_size(self) -> int:
        """Return into how many parts a batch is divided."""
        return max(1, max(1, self.dp_world_size) * max(1, self.fsdp_world_size) // (self.ulysses_size or 1))

    @property
    def data_rank(self) -> int:
        """Return which part of a batch this process gets; 0 if it is not in the mesh or has no launcher."""
        rank = self._own_rank()
        return 0 if rank is None else self.get_data_rank_from_global_rank(rank)

    def get_data_rank_from_global_rank(self, rank: int) -> int:
        """Return which part of a batch a rank gets; 0 for a rank that is not in the mesh. fsdp varies fastest."""
        dp, fsdp = self._coordinate("dp", rank) or 0, self._coordinate("fsdp", rank) or 0
        return (dp * max(1, self.fsdp_world_size) + fsdp) // (self.ulysses_size or 1)

    def get_sequence_groups(self) -> list[list[int]]:
        """Return the sequence groups, each a list of ranks that get the same rows; ordered by data rank."""
        groups: dict[int, list[int]] = {}
        for rank in sorted(self.mesh.flatten().tolist()):
            groups.setdefault(self.get_data_rank_from_global_rank(rank), []).append(rank)
        return [groups[data_rank] for data_rank in sorted(groups)]

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """Return the contiguous part of ``total_length`` items that a data rank gets (default: this process's).

        If the items do not divide evenly, the first data ranks get one more each.
        """
        data_rank = self.data_rank if rank is None else rank
        size, extra = divmod(total_length, self.data_world_size)
        start = data_rank * size + min(data_rank, extra)
        return slice(start, start + size + (data_rank < extra))

    # --- ranks with a role --------------------------------------------------------------------------------------------

    def get_tp_ranks(self) -> list[int]:
        """Return the ranks of this process's tensor-parallel group, including its own."""
        return self._neighbours("tp")

    def get_tp_last_ranks(self) -> list[int]:
        return self._ranks_at("tp", -1)

    def is_tp_last_rank(self, rank: int | None = None) -> bool:
        return self._is_among(rank, self.get_tp_last_ranks())

    def get_pp_stage_ranks(self, stage: int) -> list[int]:
        stages = max(1, self.pp_world_size)
        if not 0 <= stage < stages:
            raise InvalidInputError("stage", stage, f"0 to {stages - 1}")
        return self._ranks_at("pp", stage)

    def get_pp_first_ranks(self) -> list[int]:
        return self._ranks_at("pp", 0)

    def get_pp_last_ranks(self) -> list[int]:
        return self._ranks_at("pp", -1)

    def is_pp_first_rank(self, rank: int | None = None) -> bool:
        return self._is_among(rank, self.get_pp_first_ranks())

    def is_pp_last_rank(self, rank: int | None = None) -> bool:
        return self._is_among(rank, self.get_pp_last_ranks())

    def get_collect_ranks(self) -> list[int]:
        """Return, for each part of a batch, the rank whose result is used: the smallest of the last pipeline stage."""
        first: dict[int, int] = {}
        for rank in sorted(self.get_pp_last_ranks()):
            first.setdefault(self.get_data_rank_from_global_rank(rank), rank)
        return [first[part] for part in sorted(first)]

    # --- torch.distributed --------------------------------------------------------------------------------------------

    def create_process_group(self, dims: str | Sequence[str]) -> "torch.distributed.ProcessGroup":
        """Create a process group of the ranks that differ from this process only along ``dims``.

        This is a collective operation: all processes must call it.
        """
        from twinkle.infra.process_groups import new_group

        return new_group(self, self._checked(dims))

    def get_dim_group(self, dims: str | Sequence[str]) -> "torch.distributed.ProcessGroup":
        """Return the group of :meth:`create_process_group`, created on first use.

        All processes must ask for their groups in the same order, because creating one is collective.
        """
        from twinkle.infra.process_groups import dim_group

        return dim_group(self, self._checked(dims))

    def to_torch_device_mesh(self) -> "torch.distributed.device_mesh.DeviceMesh":
        from twinkle.infra.process_groups import torch_mesh

        return torch_mesh(self)

    def ranks_along(self, dims: Sequence[str]) -> list[list[int]]:
        """Return all ranks, grouped into lists of ranks that differ only along ``dims``."""
        axes = [self._axis(name) for name in dims]
        moved = np.moveaxis(self.mesh, axes, range(-len(axes), 0))
        return moved.reshape(-1, prod(self.mesh.shape[axis] for axis in axes)).tolist()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _checked(self, dims: str | Sequence[str]) -> tuple[str, ...]:
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        for name in names:
            self.get_dim_size(name)
        return names

    def _axis(self, name: str) -> int:
        return (self.mesh_dim_names or ()).index(name)

    def _size_or_zero(self, name: str) -> int:
        return self.get_dim_size(name) if self.has_dim(name) else 0

    def _own_rank(self) -> int | None:
        launch = read_launch()
        return None if launch.rank < 0 else launch.rank * max(1, self.world_size // launch.world_size)

    def _coordinate(self, name: str, rank: int) -> int | None:
        places: Any = np.argwhere(self.mesh == rank)
        return int(places[0][self._axis(name)]) if self.has_dim(name) and len(places) else None

    def _own_coordinate(self, name: str) -> int | None:
        rank = self._own_rank()
        return None if rank is None else self._coordinate(name, rank)

    def _neighbours(self, name: str) -> list[int]:
        rank = self._own_rank() or 0
        if not self.has_dim(name):
            return [rank]
        return next((ranks for ranks in self.ranks_along([name]) if rank in ranks), [rank])

    def _ranks_at(self, name: str, place: int) -> list[int]:
        ranks = self.mesh.take(place, axis=self._axis(name)) if self.has_dim(name) else self.mesh
        return sorted(int(rank) for rank in ranks.flatten())

    def _is_among(self, rank: int | None, ranks: list[int]) -> bool:
        asked = (self._own_rank() or 0) if rank is None else rank
        return asked in ranks
