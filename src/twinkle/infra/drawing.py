"""Draw device groups, their ranks, and how components are laid out on them, as text."""

from collections.abc import Iterator, Sequence

import numpy as np

from twinkle.environment import read_launch
from twinkle.infra.components import Component, components
from twinkle.infra.device_group import DeviceGroup, GroupPlan, plan_groups
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.initialization import current_settings
from twinkle.infra.platform import Platform

__all__ = ["get_device_placement"]

_WIDTH = 80
_MOST_ROWS, _MOST_COLUMNS, _MOST_GRIDS, _MOST_RANKS = 6, 10, 4, 16


def get_device_placement(device_group: DeviceGroup | Sequence[DeviceGroup] | None = None) -> str:
    """Return a drawing, 80 columns wide, of the groups, their ranks, and the layout of the components on them.

    Without an argument it shows the groups that ``initialize`` got, or without groups the processes of this program.
    """
    lines = ["Device placement"]
    for plan in _plans(device_group):
        lines += ["", *_group_lines(plan, [one for one in components() if one.group in (None, plan.name)])]
    inner = _WIDTH - 4
    boxed = [f"│ {line[:inner]:<{inner}} │" for line in lines]
    edge = "─" * (_WIDTH - 2)
    return "\n".join(["", f"┌{edge}┐", *boxed, f"└{edge}┘"])


def _plans(groups: DeviceGroup | Sequence[DeviceGroup] | None) -> tuple[GroupPlan, ...]:
    if groups is None:
        if current_settings().plans:
            return current_settings().plans
        groups = DeviceGroup("default", read_launch().world_size, Platform.get_platform().name)
    listed = [groups] if isinstance(groups, DeviceGroup) else groups
    return plan_groups(listed, nproc_per_node=8, ncpu_proc_per_node=8)


def _group_lines(plan: GroupPlan, placed: Sequence[Component]) -> Iterator[str]:
    each = f", {plan.gpus_per_worker} devices each" if plan.gpus_per_worker > 1 else ""
    workers = "1 worker" if len(plan.workers) == 1 else f"{len(plan.workers)} workers"
    yield f"group {plan.name}: {workers} on {plan.platform.name}{each}, {_ranks_text(plan.ranks)}"
    for component in placed:
        yield f"  {component.name}: {_sizes_text(component.mesh)}"
        for line in _grids(component.mesh):
            yield f"    {line}"


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_RANKS])
    return f"ranks {shown}" if len(ranks) <= _MOST_RANKS else f"{len(ranks)} ranks {shown}, … {ranks[-1]}"


def _sizes_text(mesh: DeviceMesh) -> str:
    """Return the sizes of the mesh, then what divides the same ranks in another way."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    others = {"ep": mesh.ep_size, "ulysses": mesh.ulysses_size, "vpp": mesh.vpp_size}
    active = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    more = [f"{name} {size}" for name, size in others.items() if size is not None and size > 1]
    more += ["sequence parallel"] if mesh.sequence_parallel else []
    return ", ".join([" × ".join(active) if active else "one rank", *more])


def _grids(mesh: DeviceMesh) -> Iterator[str]:
    """Yield the lines of grids of ranks, over the dimensions larger than 1.

    The last dimension runs across, the second to last down; there is one grid for each index of the others.
    """
    names = mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.mesh.ndim))
    active = [axis for axis, size in enumerate(mesh.mesh.shape) if size > 1]
    if not active:
        return
    ranks = mesh.mesh.reshape([mesh.mesh.shape[axis] for axis in active])
    labels = [names[axis] for axis in active]
    if ranks.ndim == 1:
        yield from _grid(ranks[None], None, labels[0])
        return
    outer = ranks.shape[:-2]
    for place in list(np.ndindex(outer))[:_MOST_GRIDS]:
        if place:
            yield ", ".join(f"{name} {index}" for name, index in zip(labels, place, strict=False))
        yield from _grid(ranks[place], labels[-2], labels[-1])
    if np.prod(outer) > _MOST_GRIDS:
        yield f"… and {int(np.prod(outer)) - _MOST_GRIDS} more"


def _grid(ranks: np.ndarray, down: str | None, across: str) -> Iterator[str]:
    rows, columns = ranks.shape
    cell = max(len(f"{across} {min(columns, _MOST_COLUMNS) - 1}"), len(str(ranks.max()))) + 1
    margin = 0 if down is None else len(f"{down} {min(rows, _MOST_ROWS) - 1}") + 1
    more = " …" if columns > _MOST_COLUMNS else ""
    head = [f"{f'{across} {column}':>{cell}}" for column in range(min(columns, _MOST_COLUMNS))]
    yield " " * margin + "".join(head) + more
    for row in range(min(rows, _MOST_ROWS)):
        label = "" if down is None else f"{down} {row}"
        cells = "".join(f"{rank:>{cell}}" for rank in ranks[row][:_MOST_COLUMNS])
        yield f"{label:<{margin}}{cells}{more}"
    if rows > _MOST_ROWS:
        yield f"… and {rows - _MOST_ROWS} more rows"
