"""The memory addresses of a batch's adapters, with which one kernel launch per product serves any mix of stacks.

Shapes: T rows, I input and O output features, G groups of all segments, M linear layers, R the largest rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.lora.segments import SegmentLora
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.decoder.tiles import TILE_ROWS
from twinkle.model.decoder.transfer import to_device

_A, _B, _DA, _DB = range(4)


def table_for(segments: Sequence[SegmentLora], names: Sequence[str]) -> "LoraTable | None":
    """Return the table for these segments, or None if the kernels cannot run or are not needed.

    The kernels run in bf16 on CUDA. Groups of equal size in one stack do not need them: they are one batched product.
    """
    if not segments or (len(segments) == 1 and segments[0].segment.groups.equal):
        return None
    weights_GP = segments[0].weights_GP
    can_run = weights_GP.is_cuda and weights_GP.dtype == torch.bfloat16
    return LoraTable.for_segments(segments, names) if can_run else None


class LoraTable:
    """For each linear layer the addresses of every group's A, B and gradients, and the rows of each group."""

    def __init__(self, names: Sequence[str], addresses_M4G: Tensor, rows: Mapping[str, "TableRows"], rank: int) -> None:
        """``rows``: by the name of the layer. ``rank``: the largest of all groups."""
        self._addresses_M4G = addresses_M4G
        self._places = {name: place for place, name in enumerate(names)}
        self._rows = rows
        self._rank = rank

    @classmethod
    def for_segments(cls, segments: Sequence[SegmentLora], names: Sequence[str]) -> "LoraTable":
        """Return the table of these segments, which must outlive it: it holds addresses, not references."""
        device = segments[0].weights_GP.device
        addresses = np.concatenate([_addresses(segment, names) for segment in segments], 2)
        # Layers with the same ranks share their spans and tiles; without rank patterns that is all layers.
        by_ranks: dict[tuple[int, ...], TableRows] = {}
        rows: dict[str, TableRows] = {}
        for name in names:
            ranks = tuple(segment.layout.bucket(name) for segment in segments)
            if ranks not in by_ranks:
                by_ranks[ranks] = TableRows.build(segments, ranks, device)
            rows[name] = by_ranks[ranks]
        largest = max(segment.layout.rank for segment in segments)
        return cls(names, to_device(torch.from_numpy(addresses), device), rows, largest)

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor, *, beta: int = 1) -> None:
        """Compute h = x A.T and y = beta · y + h B.T, in place."""
        from twinkle.model.decoder.lora.lora_kernels import lora_down, lora_up  # Triton comes with CUDA builds of torch

        addresses_4G, tiles = self._addresses_M4G[self._places[name]], self._rows[name].tiles
        lora_down(h_TR, x_TI, addresses_4G[_A], tiles, x_TI.shape[1], self._rank, a=True)
        lora_up(y_TO, h_TR, addresses_4G[_B], tiles, y_TO.shape[1], self._rank, a=False, beta=beta)

    def add_gradient(
        self, name: str, dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, dx_TI: Tensor, *, beta: int = 1
    ) -> None:
        """Add to the gradients of A and B, and compute dx = beta · dx + dy B A, in place."""
        from twinkle.model.decoder.lora.lora_kernels import add_lora_outer, lora_down, lora_up

        addresses_4G, rows = self._addresses_M4G[self._places[name]], self._rows[name]
        inputs, outputs = x_TI.shape[1], dy_TO.shape[1]
        dh_TR = torch.empty_like(h_TR)
        lora_down(dh_TR, dy_TO, addresses_4G[_B], rows.tiles, outputs, self._rank, a=False)
        lora_up(dx_TI, dh_TR, addresses_4G[_A], rows.tiles, inputs, self._rank, a=True, beta=beta)
        add_lora_outer(dh_TR, x_TI, addresses_4G[_DA], rows.spans, inputs, self._rank, a=True)
        add_lora_outer(dy_TO, h_TR, addresses_4G[_DB], rows.spans, outputs, self._rank, a=False)


@dataclass(frozen=True)
class TableRows:
    """The rows of each group, whole and in tiles, with the rank that the group has on some of the layers."""

    spans: Tensor  # (G, 4) int32: group, first row, end, rank
    tiles: Tensor  # (n, 4) int32

    @classmethod
    def build(cls, segments: Sequence[SegmentLora], ranks: Sequence[int], device: torch.device) -> "TableRows":
        spans: list[tuple[int, int, int, int]] = []
        for segment, rank in zip(segments, ranks, strict=True):
            row = segment.segment.start
            for size in segment.segment.groups.sizes:
                spans.append((len(spans), row, row + size, rank))
                row += size
        return cls(*(to_device(torch.tensor(each, dtype=torch.int32), device) for each in (spans, tiles_of(spans))))


def tiles_of(spans: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return spans (group, first row, end, rank) in tiles: the same, with one entry for each TILE_ROWS rows."""
    return [(g, row, end, rank) for g, start, end, rank in spans for row in range(start, end, TILE_ROWS)]


def _addresses(segment: SegmentLora, names: Sequence[str]) -> np.ndarray:
    """Return addresses (M, 4, G) int64, of A, B, dA and dB; 0 where a layer has no adapter, or no gradient."""
    offsets_M2 = module_offsets(segment.layout, names)
    tables = []
    for rows_GP in (segment.weights_GP, segment.gradient_GP):
        if rows_GP is None:
            tables.append(np.zeros((len(names), 2, len(segment.weights_GP)), np.int64))
        else:
            starts_G = rows_GP.data_ptr() + np.arange(len(rows_GP)) * rows_GP.stride(0) * rows_GP.itemsize
            tables.append(addresses_in(starts_G, offsets_M2, rows_GP.itemsize))
    return np.concatenate(tables, 1)


def module_offsets(layout: RowLayout, names: Sequence[str]) -> NDArray[np.int64]:
    """Return where A and B of each layer begin in an adapter's row, (M, 2), in elements; -1: the layer has none."""
    return np.array([layout.offsets(name) if layout.has(name) else (-1, -1) for name in names], np.int64)


def addresses_in(starts_G: NDArray[np.int64], offsets_M2: NDArray[np.int64], itemsize: int) -> NDArray[np.int64]:
    """Return the addresses (M, 2, G) of A and B of each layer in rows that begin at ``starts_G``; 0: it has none."""
    offsets_M21 = offsets_M2[:, :, None]
    return np.where(offsets_M21 >= 0, starts_G + offsets_M21 * itemsize, 0)
