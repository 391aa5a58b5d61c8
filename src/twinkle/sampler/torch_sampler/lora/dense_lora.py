"""LoRA of a few versions as two plain matrix products. Used on CPUs, where one large product beats many small ones.

All A matrices of a linear layer are stacked into one matrix, and so are all B matrices. Every row is multiplied with
every A; the columns of other versions are then set to zero, so that they add exactly nothing in the product with B. The
weights must be finite, because 0 · NaN would put NaN into the rows of other versions; :meth:`DenseLora.takes` refuses
versions with other weights.

Shapes: T rows, I input and O output features, R rank of a version, W ranks of all versions that have the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.model.adapters.adapter import Adapter
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.lora import WithoutExperts
from twinkle.model.decoder.products import add_product, linear

MAX_WIDTH = 256  # sum of the ranks: beyond that, the products with other versions' A cost more than they save


@dataclass(frozen=True)
class _Stacked:
    """The stacked LoRA of one linear layer.

    ``members``: indices of the versions that have LoRA on this layer; ``ranks``: their ranks there, padded to buckets.
    """

    a_WI: Tensor
    b_OW: Tensor
    members: tuple[int, ...]
    ranks: tuple[int, ...]


class DenseLora:
    """Stacked copies of the weights of a set of versions."""

    def __init__(self, versions: Sequence[Adapter], architecture: Architecture) -> None:
        self.versions = tuple(versions)
        self._places = {id(version): place for place, version in enumerate(self.versions)}
        self._architecture = architecture
        names = [target.name for target in (*architecture.projections, architecture.head)]
        stacked = {name: _stack(self.versions, name) for name in names}
        self._stacked = {name: each for name, each in stacked.items() if each is not None}

    @staticmethod
    def takes(versions: Sequence[Adapter]) -> bool:
        narrow = sum(version.layout.rank for version in versions) <= MAX_WIDTH
        return narrow and all(version.finite and not version.layout.has_experts for version in versions)

    def covers(self, versions: Sequence[Adapter]) -> bool:
        return {id(version) for version in versions} <= self._places.keys()

    def layers(self, runs: Sequence[tuple[Adapter | None, int]]) -> tuple["DenseLayer", ...]:
        """Return one entry for each decoder layer, for consecutive rows of these versions (None: the base model)."""
        owners = [-1 if version is None else self._places[id(version)] for version, _ in runs]
        rows = DenseRows(self, torch.tensor(owners).repeat_interleave(torch.tensor([count for _, count in runs])))
        path, count = self._architecture.layers_path, self._architecture.layer_count
        return tuple(DenseLayer(rows, f"{path}.{index}.") for index in range(count))

    def get(self, name: str) -> _Stacked | None:
        return self._stacked.get(name)


class DenseRows:
    """The rows of one pass, with the version that each row belongs to."""

    def __init__(self, lora: DenseLora, owners_T: Tensor) -> None:
        self._lora = lora
        self._owners_T = owners_T
        self._strangers: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def has(self, name: str) -> bool:
        return self._lora.get(name) is not None

    def product(self, name: str, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return x A.T with zeros in the columns of other versions, (T, W), and B.T, (W, O)."""
        stacked = self._lora.get(name)
        assert stacked is not None, "layers without adapters are not asked"
        h_TW = linear(x_TI, stacked.a_WI).masked_fill_(self._strangers_of(stacked), 0)
        return h_TW, stacked.b_OW.t()

    def _strangers_of(self, stacked: _Stacked) -> Tensor:
        """Return a mask (T, W), True where a column belongs to another version than the row.

        Layers with the same members and ranks share one mask.
        """
        key = stacked.members, stacked.ranks
        if key not in self._strangers:
            columns_W = torch.tensor(stacked.members).repeat_interleave(torch.tensor(stacked.ranks))
            self._strangers[key] = self._owners_T[:, None] != columns_W
        return self._strangers[key]


@dataclass(frozen=True)
class DenseLayer(WithoutExperts):
    """The LoRA of one decoder layer; implements :class:`~twinkle.model.decoder.lora.lora.LayerAdapters`."""

    rows: DenseRows
    prefix: str  # prepended to the names of its linear layers
    width: int = 0  # no buffer for x A.T is needed: the product here allocates its own

    def has(self, name: str) -> bool:
        return self.rows.has(self.prefix + name)

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor) -> None:
        h_TW, b_WO = self.rows.product(self.prefix + name, x_TI)
        add_product(y_TO, h_TW, b_WO)


def _stack(versions: Sequence[Adapter], name: str) -> _Stacked | None:
    members = tuple(place for place, version in enumerate(versions) if version.layout.has(name))
    if not members:
        return None
    pairs = [versions[member].layout.views(versions[member].compute_copy, name) for member in members]
    a_WI, b_OW = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)
    return _Stacked(a_WI, b_OW, members, tuple(len(a) for a, _ in pairs))
