"""LoRA of a few versions as two plain products: the way for CPUs, where many small products cost more than their sum.

All A of a linear layer are stacked into one matrix, all B likewise. Every row is multiplied with every A; what belongs
to other versions is set to zero before the product with B, where it adds exactly nothing. The weights must be finite,
because 0 · NaN would be NaN in a stranger's row: versions that are not never come here.

Shapes: T rows, I input and O output features, R rank of a version, W ranks of all versions that have the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture

MAX_WIDTH = 256  # ranks together: beyond that, the products with strangers' A cost more than they save


@dataclass(frozen=True)
class _Stacked:
    """One linear layer's adapters. ``members`` are the versions that have one there, by their place in the set."""

    a_WI: Tensor
    b_OW: Tensor
    members: tuple[int, ...]


class DenseLora:
    """Stacked copies of the weights of a set of versions."""

    def __init__(self, versions: Sequence[Adapter], architecture: Architecture) -> None:
        self.versions = tuple(versions)
        self._places = {id(version): place for place, version in enumerate(self.versions)}
        self._architecture = architecture
        names = [target.name for target in (*architecture.linear, architecture.head)]
        stacked = {name: _stack(self.versions, name) for name in names}
        self._stacked = {name: each for name, each in stacked.items() if each is not None}

    @staticmethod
    def takes(versions: Sequence[Adapter]) -> bool:
        narrow = sum(version.layout.rank for version in versions) <= MAX_WIDTH
        return narrow and all(version.finite for version in versions)

    def covers(self, versions: Sequence[Adapter]) -> bool:
        return {id(version) for version in versions} <= self._places.keys()

    def layers(self, runs: Sequence[tuple[Adapter | None, int]]) -> tuple["DenseLayer", ...]:
        """One entry a decoder layer, for consecutive rows of these versions (None: of the base model)."""
        owners = [-1 if version is None else self._places[id(version)] for version, _ in runs]
        rows = DenseRows(self, torch.tensor(owners).repeat_interleave(torch.tensor([count for _, count in runs])))
        path, count = self._architecture.layers_path, self._architecture.layer_count
        return tuple(DenseLayer(rows, f"{path}.{index}.") for index in range(count))

    def get(self, name: str) -> _Stacked | None:
        return self._stacked.get(name)

    def ranks(self, members: tuple[int, ...]) -> list[int]:
        return [self.versions[member].layout.rank for member in members]


class DenseRows:
    """A set of versions and whose rows a pass has."""

    def __init__(self, lora: DenseLora, owners_T: Tensor) -> None:
        self._lora = lora
        self._owners_T = owners_T
        self._strangers: dict[tuple[int, ...], Tensor] = {}

    def has(self, name: str) -> bool:
        return self._lora.get(name) is not None

    def product(self, name: str, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """x A.T with zeros for strangers, (T, W), and B.T (W, O)."""
        stacked = self._lora.get(name)
        assert stacked is not None, "layers without adapters are not asked"
        h_TW = F.linear(x_TI, stacked.a_WI).masked_fill_(self._strangers_of(stacked.members), 0)
        return h_TW, stacked.b_OW.t()

    def _strangers_of(self, members: tuple[int, ...]) -> Tensor:
        """(T, W), True where a column is not of the row's own version; all layers use the same few."""
        if members not in self._strangers:
            ranks = torch.tensor(self._lora.ranks(members))
            columns_W = torch.tensor(members).repeat_interleave(ranks)
            self._strangers[members] = self._owners_T[:, None] != columns_W
        return self._strangers[members]


@dataclass(frozen=True)
class DenseLayer:
    """A :class:`~twinkle.model.decoder.lora.lora.LayerAdapters`."""

    rows: DenseRows
    prefix: str  # of the names of its linear layers
    width: int = 0  # the products here have their own

    def has(self, name: str) -> bool:
        return self.rows.has(self.prefix + name)

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor) -> None:
        h_TW, b_WO = self.rows.product(self.prefix + name, x_TI)
        torch.addmm(y_TO, h_TW, b_WO, out=y_TO)


def _stack(versions: Sequence[Adapter], name: str) -> _Stacked | None:
    members = tuple(place for place, version in enumerate(versions) if version.layout.has(name))
    if not members:
        return None
    pairs = [versions[member].layout.views(versions[member].compute_copy, name) for member in members]
    return _Stacked(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1), members)
