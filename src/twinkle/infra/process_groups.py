"""Process groups of torch.distributed along the dimensions of a mesh."""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

__all__ = ["dim_group", "new_group", "sequence_groups", "torch_mesh"]

Dims = tuple[str, ...]


class Mesh(Protocol):
    """The part of :class:`~twinkle.infra.device_mesh.DeviceMesh` that is needed here."""

    @property
    def mesh(self) -> np.ndarray: ...

    @property
    def mesh_dim_names(self) -> Dims | None: ...

    @property
    def device_type(self) -> str | None: ...

    @property
    def world_size(self) -> int: ...

    def ranks_along(self, dims: Sequence[str]) -> list[list[int]]: ...

    def get_sequence_groups(self) -> list[list[int]]: ...


_groups: WeakKeyDictionary[Mesh, dict[Dims, dist.ProcessGroup]] = WeakKeyDictionary()


def dim_group(mesh: Mesh, dims: Dims) -> dist.ProcessGroup:
    """Return the group of this process along ``dims``, created on first use."""
    made = _groups.setdefault(mesh, {})
    if dims not in made:
        made[dims] = new_group(mesh, dims)
    return made[dims]


def new_group(mesh: Mesh, dims: Dims) -> dist.ProcessGroup:
    # Every process must take part in creating every group, including those it is not in: torch.distributed requires
    # that all processes create the same groups in the same order.
    return _new_group(mesh, mesh.ranks_along(dims))


_sequence_groups: WeakKeyDictionary[Mesh, tuple[dist.ProcessGroup, dist.ProcessGroup]] = WeakKeyDictionary()


def sequence_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of this process, created on first use, which is collective.

    The first is its sequence group. The second has one rank of each sequence group: those at the same place as this
    process. A sum over it counts every row once.
    """
    if mesh not in _sequence_groups:
        sequences = mesh.get_sequence_groups()
        data = [list(ranks) for ranks in zip(*sequences, strict=True)]
        _sequence_groups[mesh] = _new_group(mesh, sequences), _new_group(mesh, data)
    return _sequence_groups[mesh]


def _new_group(mesh: Mesh, groups: list[list[int]]) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration(groups)
    if own is None:
        raise RuntimeError(f"rank {dist.get_rank()} is not in the mesh of {mesh.world_size} ranks")
    return own


def torch_mesh(mesh: Mesh) -> TorchMesh:
    assert mesh.device_type is not None
    return TorchMesh(mesh.device_type, mesh.mesh.tolist(), mesh_dim_names=mesh.mesh_dim_names)
