"""torch.distributed's groups along the dimensions of a mesh."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

if TYPE_CHECKING:
    from twinkle.infra.device_mesh import DeviceMesh

__all__ = ["dim_group", "new_group", "torch_mesh"]

Dims = tuple[str, ...]

_groups: "WeakKeyDictionary[DeviceMesh, dict[Dims, dist.ProcessGroup]]" = WeakKeyDictionary()


def dim_group(mesh: "DeviceMesh", dims: Dims) -> dist.ProcessGroup:
    """The group of this process along ``dims``, made when it is first asked for."""
    made = _groups.setdefault(mesh, {})
    if dims not in made:
        made[dims] = new_group(mesh, dims)
    return made[dims]


def new_group(mesh: "DeviceMesh", dims: Dims) -> dist.ProcessGroup:
    # Every process takes part in making every group, also those it is not in: torch.distributed counts them alike.
    own, _ = dist.new_subgroups_by_enumeration(mesh.ranks_along(dims))
    if own is None:
        raise RuntimeError(f"rank {dist.get_rank()} is not of the mesh of {mesh.world_size} ranks")
    return own


def torch_mesh(mesh: "DeviceMesh") -> TorchMesh:
    assert mesh.device_type is not None
    return TorchMesh(mesh.device_type, mesh.mesh.tolist(), mesh_dim_names=mesh.mesh_dim_names)
