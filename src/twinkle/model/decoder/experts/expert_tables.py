"""The adapters on experts in captured graphs: their tables are at addresses that never change.

Every layer with experts has a table of the adapters' matrices for each of its three projections, which all experts
share on the hidden side, as Tinker's do. :class:`ExpertTables` says what stands where; its users own the memory.

Shapes: G groups (requests, or versions), L layers with experts, n = 3 L projections.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.architecture import Experts
from twinkle.model.decoder.experts.on_device import DA, DB, RANK, A, B, DeviceExperts, DeviceGroups, DevicePart
from twinkle.model.decoder.lora.stacks import RowLayout, Target

ENTRIES = 5  # of an adapter, for each projection: A, B, their gradients, and the rank
_UP = ("w1", "w3")
_DOWN = ("w2",)


class ExpertTables:
    """The places of all layers' projections in tables, for adapters of a rank of up to ``rank``."""

    def __init__(self, experts: Sequence[Experts], rank: int) -> None:
        self.names = [f"{each.name}.{last}" for each in experts for last in (*_UP, *_DOWN)]
        self._places = {each.name: place for place, each in enumerate(experts)}
        self._outputs = [_outputs(each) for each in experts]  # of gate and of up
        self._rank = rank
        self._offsets: dict[str, NDArray[np.int64]] = {}  # by the digest of a layout

    @staticmethod
    def takes(layout: RowLayout) -> bool:
        """Return whether the tables can hold adapters of this layout: those that it has on experts are Tinker's."""
        on_experts = [target for target in layout.targets if target.copies is not None]
        return all(_is_shared_outer(target) for target in on_experts)

    def entries(self, layout: RowLayout, weights_P: Tensor, gradient_P: Tensor | None = None) -> NDArray[np.int64]:
        """Return what the tables say of one adapter, (n, 5). The tensors must outlive them: they are addresses."""
        if layout.digest not in self._offsets:
            self._offsets[layout.digest] = _offsets(layout, self.names)
        offsets_n3 = self._offsets[layout.digest]
        entries_n5 = np.zeros((len(self.names), ENTRIES), np.int64)
        for row_P, columns in ((weights_P, (A, B)), (gradient_P, (DA, DB))):
            if row_P is not None:
                addresses_n2 = row_P.data_ptr() + offsets_n3[:, :2] * row_P.itemsize
                entries_n5[:, columns] = np.where(offsets_n3[:, :2] >= 0, addresses_n2, 0)
        entries_n5[:, RANK] = offsets_n3[:, 2]
        return entries_n5

    def layer(self, name: str, tables_n5G: Tensor, groups: DeviceGroups) -> DeviceExperts | None:
        """Return the adapters on the experts of one module; None: it is not known as one."""
        if name not in self._places:
            return None
        place = self._places[name]
        gate, up, down = tables_n5G[3 * place : 3 * place + 3]
        of_gate, of_up = self._outputs[place]
        return DeviceExperts(
            groups,
            (
                DevicePart(gate, self._rank, of_gate, shares_a=True, shares_b=False),
                DevicePart(up, self._rank, of_up, shares_a=True, shares_b=False),
            ),
            (DevicePart(down, self._rank, slice(None), shares_a=False, shares_b=True),),
        )

    def layers(self, tables_n5G: Tensor, groups: DeviceGroups) -> dict[str, DeviceExperts]:
        """Return the adapters on the experts of each module, by its name."""
        found = {name: self.layer(name, tables_n5G, groups) for name in self._places}
        return {name: each for name, each in found.items() if each is not None}


def _outputs(experts: Experts) -> tuple[slice, slice]:
    """Return which outputs of their joint product are those of gate and of up: one half each, or every second one."""
    if experts.alternating:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, experts.width), slice(experts.width, 2 * experts.width)


def _is_shared_outer(target: Target) -> bool:
    """Return whether all experts share the factor that has the hidden size."""
    last = target.name.rpartition(".")[2]
    return (last in _UP and target.experts_of_a == (1,)) or (last in _DOWN and target.experts_of_b == (1,))


def _offsets(layout: RowLayout, names: Sequence[str]) -> NDArray[np.int64]:
    """Return where A and B of each projection begin in a row, and its rank, (n, 3); -1 where it has no adapter."""
    return np.array(
        [(*layout.offsets(name), layout.bucket(name)) if layout.has(name) else (-1, -1, 0) for name in names], np.int64
    ).reshape(-1, 3)
