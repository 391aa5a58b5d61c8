"""The adapters on experts in captured graphs: their tables are at addresses that never change.

Which row belongs to which version is in one buffer for all layers. Every layer with experts has a table of the
versions' matrices for each of its three projections, which all experts share on the hidden side, as Tinker's do.

Shapes: N rows at most, G versions at most, L layers with experts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture, Experts
from twinkle.model.decoder.experts.on_device import RANK, A, B, DeviceExperts, DeviceGroups, DevicePart
from twinkle.model.decoder.lora.stacks import RowLayout, Target
from twinkle.model.decoder.transfer import to_device

_UP = ("w1", "w3")
_DOWN = ("w2",)


class ExpertSlots:
    """The experts of all layers, for up to ``versions`` adapters of a rank of up to ``rank``."""

    def __init__(self, architecture: Architecture, versions: int, rank: int, device: torch.device) -> None:
        self._experts = {each.name: place for place, each in enumerate(architecture.experts)}
        self._outputs = [_outputs(each) for each in architecture.experts]  # of gate and of up
        self._versions = versions
        self._rank = rank
        names = [f"{each.name}.{last}" for each in architecture.experts for last in (*_UP, *_DOWN)]
        self._names = names
        groups = -(-(versions + 1) // 2) * 2  # rows of 16 bytes
        self._tables_L35G = torch.zeros(len(names) // 3, 3, 5, groups, dtype=torch.int64, device=device)
        self._offsets: dict[str, np.ndarray] = {}  # by the digest of a layout

    @staticmethod
    def takes(layout: RowLayout) -> bool:
        """Return whether the tables can hold adapters of this layout: those that it has on experts are Tinker's."""
        on_experts = [target for target in layout.targets if target.copies is not None]
        return all(_is_shared_outer(target) for target in on_experts)

    def bind(self, versions: Sequence[Adapter | None]) -> None:
        """Write the addresses of these versions' weights into the tables. They must be resident."""
        if not self._experts:
            return
        entries = np.zeros((len(self._names), 5, len(versions)), np.int64)
        for number, version in enumerate(versions):
            if version is None:
                continue
            layout, row_P = version.layout, version.compute_copy
            if layout.digest not in self._offsets:
                self._offsets[layout.digest] = _offsets(layout, self._names)
            offsets_n3 = self._offsets[layout.digest]
            has = offsets_n3[:, :2] >= 0
            entries[:, [A, B], number] = np.where(has, row_P.data_ptr() + offsets_n3[:, :2] * row_P.itemsize, 0)
            entries[:, RANK, number] = offsets_n3[:, 2]
        fresh = torch.from_numpy(entries.reshape(-1, 3, 5, len(versions)))
        # Entries of earlier versions remain behind these; no row refers to them.
        self._tables_L35G[..., : len(versions)].copy_(to_device(fresh, self._tables_L35G.device))

    def groups(self, group_T: Tensor) -> DeviceGroups:
        """Return the groups of rows whose versions' numbers are in this buffer."""
        return DeviceGroups(self._versions, group_T)

    def layer(self, name: str, groups: DeviceGroups) -> DeviceExperts | None:
        """Return the adapters on the experts of one module; None: it is not known as one."""
        if name not in self._experts:
            return None
        place = self._experts[name]
        gate, up, down = self._tables_L35G[place]
        of_gate, of_up = self._outputs[place]
        return DeviceExperts(
            groups,
            (
                DevicePart(gate, self._rank, of_gate, shares_a=True, shares_b=False),
                DevicePart(up, self._rank, of_up, shares_a=True, shares_b=False),
            ),
            (DevicePart(down, self._rank, slice(None), shares_a=False, shares_b=True),),
        )


def _outputs(experts: Experts) -> tuple[slice, slice]:
    """Return which outputs of their joint product are those of gate and of up: one half each, or every second one."""
    if experts.alternating:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, experts.width), slice(experts.width, 2 * experts.width)


def _is_shared_outer(target: Target) -> bool:
    """Return whether all experts share the factor that has the hidden size."""
    last = target.name.rpartition(".")[2]
    return (last in _UP and target.experts_of_a == (1,)) or (last in _DOWN and target.experts_of_b == (1,))


def _offsets(layout: RowLayout, names: Sequence[str]) -> np.ndarray:
    """Return where A and B of each projection begin in a row, and its rank, (n, 3); -1 where it has no adapter."""
    return np.array(
        [(*layout.offsets(name), layout.bucket(name)) if layout.has(name) else (-1, -1, 0) for name in names], np.int64
    )
