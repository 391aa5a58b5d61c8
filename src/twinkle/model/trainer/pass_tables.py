"""The inputs of captured passes: what differs between passes is in tables at fixed places on the device.

A captured pass serves any requests whose numbers of rows and sequences are within its :class:`Bucket`. Before each pass
the host fills one buffer, and one copy brings it to the device: tokens and positions of the rows, the tiles of
attention and of LoRA, and the addresses of the adapters' weights and gradients. Adapters on experts have tables of
their own, and their requests are numbered apart: the kernels of experts look at each number for each expert.

Rows beyond those of the requests are padding: token 0, outside all sequences, without adapter. No other row reads them.

Shapes: T rows of a bucket, M linear layers, G requests, n tiles.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.model.decoder.architecture import Experts
from twinkle.model.decoder.attention import Packing
from twinkle.model.decoder.experts.expert_tables import ENTRIES, ExpertTables
from twinkle.model.decoder.experts.on_device import DeviceExperts, DeviceGroups
from twinkle.model.decoder.lora.lora import LayerLora
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.decoder.lora.table import LoraTable, TableRows, addresses_in, module_offsets, tiles_of
from twinkle.model.decoder.packed_attention import tile_table
from twinkle.model.decoder.tiles import TILE_ROWS
from twinkle.model.trainer.batch import GradientRows, Part

LARGEST_RANK, LARGEST_RANK_ON_EXPERTS = 128, 32  # of adapters in captured passes
_MOST_REQUESTS, _MOST_SEQUENCES = 64, 256
_MOST_REQUESTS_ON_EXPERTS = 32
_ALIGNMENT = 64  # bytes; Triton compiles another kernel for addresses that are not multiples of 16


@dataclass(frozen=True, order=True)
class Bucket:
    """The limits of a captured pass."""

    rows: int

    @property
    def requests(self) -> int:
        return min(max(8, self.rows // 16), _MOST_REQUESTS)

    @property
    def sequences(self) -> int:
        return min(max(8, self.rows // 8), _MOST_SEQUENCES)

    @property
    def requests_on_experts(self) -> int:
        return min(self.requests, _MOST_REQUESTS_ON_EXPERTS)

    @property
    def lora_tiles(self) -> int:
        """Return the most tiles of LoRA: every request, and the padding, may end with a tile that is not full."""
        return self.rows // TILE_ROWS + self.requests + 1

    @property
    def attention_tiles(self) -> int:
        return self.rows // TILE_ROWS + self.sequences

    def takes(self, parts: Sequence[Part]) -> bool:
        """Return whether the numbers of rows, requests and sequences of these parts are within the limits."""
        sequences = sum(len(part.data) for part in parts)
        rows = sum(sum(part.lengths) for part in parts)
        if rows > self.rows or sequences > self.sequences or len(parts) > self.requests:
            return False
        return sum(map(_is_on_experts, parts)) <= self.requests_on_experts


def can_be_captured(part: Part) -> bool:
    """Return whether a captured pass can compute this part.

    It has no dropout and one rank, which is not too large; on experts it is of Tinker's form.
    """
    if part.dropout is not None:
        return False
    if part.adapter is None:
        return True
    layout = part.adapter.layout
    largest = LARGEST_RANK_ON_EXPERTS if layout.has_experts else LARGEST_RANK
    return layout.ranks is None and layout.rank <= largest and ExpertTables.takes(layout)


def _is_on_experts(part: Part) -> bool:
    return part.adapter is not None and part.adapter.layout.has_experts


class PassTables:
    """The tables of all captured passes, in one buffer on the device. Passes of smaller buckets use parts of them."""

    def __init__(
        self, largest: Bucket, names: Sequence[str], device: torch.device, experts: Sequence[Experts] = ()
    ) -> None:
        """``names``: of the model's linear layers."""
        self._names = list(names)
        self._experts = ExpertTables(experts, LARGEST_RANK_ON_EXPERTS)
        self._nobody = largest.requests  # the number of the request that rows without adapter belong to
        self._device = device
        self._shapes: dict[str, tuple[type[np.integer[Any]], tuple[int, ...]]] = {
            "ids": (np.int64, (largest.rows,)),
            "positions": (np.int64, (largest.rows,)),
            # One more column is for rows without adapter. 8 more, not one, keep each layer's addresses aligned.
            "addresses": (np.int64, (len(names), 4, largest.requests + 8)),
            "spans": (np.int32, (largest.requests, 4)),
            "lora_tiles": (np.int32, (largest.lora_tiles, 4)),
            "attention_tiles": (np.int32, (largest.attention_tiles, 3)),
        }
        if experts:
            groups = largest.requests_on_experts + 8
            self._shapes |= {
                "expert_addresses": (np.int64, (len(self._experts.names), ENTRIES, groups)),
                "expert_group_of_rows": (np.int32, (largest.rows,)),
                "expert_group_bounds": (np.int32, (2, groups)),
            }
        sizes = {name: np.dtype(kind).itemsize * math.prod(shape) for name, (kind, shape) in self._shapes.items()}
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()))
        self._bytes = {
            name: slice(start, start + size) for (name, size), start in zip(sizes.items(), [0, *ends[:-1]], strict=True)
        }
        self._buffer = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self._offsets: dict[str, NDArray[np.int64]] = {}  # by the digest of a layout

    def ids_and_positions(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        return self._view("ids")[None, : bucket.rows], self._view("positions")[None, : bucket.rows]

    def packing(self, bucket: Bucket) -> Packing:
        tiles_n3 = self._view("attention_tiles")[: bucket.attention_tiles]
        return Packing((), torch.empty(0, dtype=torch.int32, device=self._device), bucket.rows, tiles_n3)

    def lora(self, bucket: Bucket, prefixes: Sequence[str]) -> tuple["TableLora", ...]:
        """Return the adapters of each decoder layer. ``prefixes``: of the names of each layer's linear layers."""
        rows = TableRows(self._view("spans")[: bucket.requests], self._view("lora_tiles")[: bucket.lora_tiles])
        table = LoraTable(self._names, self._view("addresses"), dict.fromkeys(self._names, rows), LARGEST_RANK)
        experts: dict[str, DeviceExperts] = {}
        if self._experts.names:
            count, tables_n5G = bucket.requests_on_experts, self._view("expert_addresses")
            starts, ends = self._view("expert_group_bounds")[:, : count + 1]
            groups = DeviceGroups(count, self._view("expert_group_of_rows")[: bucket.rows], starts, ends)
            experts = self._experts.layers(tables_n5G, groups)
        return tuple(TableLora(prefix, table, experts) for prefix in prefixes)

    def fill(self, parts: Sequence[Part], bucket: Bucket, gradients: Sequence[GradientRows]) -> None:
        """Write the tables of these parts, in row order. ``gradients``: of all adapters in order; empty: none."""
        host = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        fields = {name: self._part(host, name).numpy() for name in self._shapes}
        tokens = [datum.tokens for part in parts for datum in part.data]
        count = sum(map(len, tokens))
        fields["ids"][:count] = np.concatenate(tokens)
        fields["positions"][:count] = np.concatenate([np.arange(len(row)) for row in tokens])
        tiles_n3 = tile_table([len(row) for row in tokens])
        fields["attention_tiles"][: len(tiles_n3)] = tiles_n3
        spans = self._spans(parts, bucket)
        trained = [span for span in spans if span[0] != self._nobody]
        fields["spans"][: len(trained)] = np.array(trained, np.int32).reshape(-1, 4)
        lora_tiles = tiles_of(spans)
        fields["lora_tiles"][: len(lora_tiles)] = lora_tiles
        self._write_addresses(fields["addresses"], parts, gradients)
        if self._experts.names:
            self._write_experts(fields, parts, bucket, gradients)
        self._buffer.copy_(host, non_blocking=True)

    def _spans(self, parts: Sequence[Part], bucket: Bucket) -> list[tuple[int, int, int, int]]:
        """Return (request, first row, end, rank) for all rows of the bucket. Adapters are numbered from 0."""
        spans: list[tuple[int, int, int, int]] = []
        row = number = 0
        for part in parts:
            end = row + sum(part.lengths)
            if part.adapter is None:
                spans.append((self._nobody, row, end, 0))
            else:
                spans.append((number, row, end, part.adapter.layout.rank))
                number += 1
            row = end
        return [*spans, (self._nobody, row, bucket.rows, 0)]

    def _write_addresses(
        self, addresses_M4G: NDArray[np.int64], parts: Sequence[Part], gradients: Sequence[GradientRows]
    ) -> None:
        rows = iter([row_P for each in gradients for row_P in each.rows_GP])
        adapters = [part.adapter for part in parts if part.adapter is not None]
        for number, adapter in enumerate(adapters):
            offsets_M2 = self._module_offsets(adapter.layout)
            weights_P, gradient_P = adapter.compute_copy, next(rows, None)
            start = np.array([weights_P.data_ptr()])
            addresses_M4G[:, :2, number] = addresses_in(start, offsets_M2, weights_P.itemsize)[:, :, 0]
            if gradient_P is not None:
                start = np.array([gradient_P.data_ptr()])
                addresses_M4G[:, 2:, number] = addresses_in(start, offsets_M2, gradient_P.itemsize)[:, :, 0]

    def _write_experts(
        self,
        fields: Mapping[str, NDArray[Any]],
        parts: Sequence[Part],
        bucket: Bucket,
        gradients: Sequence[GradientRows],
    ) -> None:
        """Number the requests with adapters on experts; all other rows belong to a group without adapter."""
        rows = iter([row_P for each in gradients for row_P in each.rows_GP])
        groups_T, (starts_G, ends_G) = fields["expert_group_of_rows"], fields["expert_group_bounds"]
        groups_T[:] = bucket.requests_on_experts
        row = number = 0
        for part in parts:
            end = row + sum(part.lengths)
            gradient_P = None if part.adapter is None else next(rows, None)
            if part.adapter is not None and _is_on_experts(part):
                groups_T[row:end], starts_G[number], ends_G[number] = number, row, end
                fields["expert_addresses"][:, :, number] = self._experts.entries(
                    part.adapter.layout, part.adapter.compute_copy, gradient_P
                )
                number += 1
            row = end

    def _module_offsets(self, layout: RowLayout) -> NDArray[np.int64]:
        if layout.digest not in self._offsets:
            self._offsets[layout.digest] = module_offsets(layout, self._names)
        return self._offsets[layout.digest]

    def _view(self, name: str) -> Tensor:
        """Return one table on the device."""
        return self._part(self._buffer, name)

    def _part(self, buffer: Tensor, name: str) -> Tensor:
        kind, shape = self._shapes[name]
        return buffer[self._bytes[name]].view(torch.int64 if kind is np.int64 else torch.int32).view(shape)


class TableLora(LayerLora):
    """The adapters of one decoder layer in captured passes: every linear layer may have some, in any rows."""

    def __init__(self, prefix: str, table: LoraTable, experts: Mapping[str, DeviceExperts]) -> None:
        super().__init__(prefix, (), table)
        self.width = LARGEST_RANK
        self._of_experts = experts  # by the full name of the module

    def has(self, name: str) -> bool:
        return True

    def covers(self, name: str, rows: int) -> bool:
        return True  # the tiles cover all rows; LoRA of rows without adapter is 0

    def experts_on_device(self, name: str, x_TH: Tensor) -> DeviceExperts | None:
        return self._of_experts.get(self._prefix + name)
