"""Attention of new tokens to themselves and to what the cache holds of their sequences.

One forward pass computes a span of each sequence: a prompt from its beginning, a later piece of one, or the one token
drawn last. Spans that begin a sequence attend among themselves, by the same code as in training. The others read keys
and values back from the cache, those of like length together, padded to the longest.

Shapes: T rows, n spans of a group, C rows of a span, L keys, H query heads, J key/value heads, D head
dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.decoder.attention import Packing, attend_packed, softcapped_attention
from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache, LayerShape, blocks_for

_MOST_PADDING = 2  # times the keys that are there


@dataclass(frozen=True)
class Span:
    """Tokens ``start``…``stop`` of a sequence whose blocks are these."""

    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Group:
    """Spans of C rows each, which read the cache together."""

    rows_nC: Tensor
    table_nB: Tensor
    positions_nC: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window; all layers use the same few

    @classmethod
    def of(cls, spans: Sequence[Span], first_rows: Sequence[int], device: torch.device) -> "Group":
        width, count = blocks_for(max(span.stop for span in spans)), spans[0].stop - spans[0].start
        tables = [[*span.blocks[:width], *[0] * (width - len(span.blocks))] for span in spans]
        steps_C = torch.arange(count)
        return cls(
            (torch.tensor(first_rows)[:, None] + steps_C).to(device),
            torch.tensor(tables).to(device),
            (torch.tensor([span.start for span in spans])[:, None] + steps_C).to(device),
        )

    def mask(self, window: int | None) -> Tensor:
        """(n, 1, C, L), True where a row may look: at itself and before, not further back than the window."""
        if window not in self.masks:
            keys_L = torch.arange(self.table_nB.shape[1] * BLOCK, device=self.table_nB.device)
            distance_nCL = self.positions_nC[:, :, None] - keys_L
            allowed_nCL = distance_nCL >= 0
            if window is not None:
                allowed_nCL &= distance_nCL < window
            self.masks[window] = allowed_nCL.unsqueeze(1)
        return self.masks[window]

    def read(self, blocks: Tensor) -> Tensor:
        """Keys or values of these spans, (n, J, L, D), of ``blocks`` (B, BLOCK, J, D)."""
        count, width = self.table_nB.shape
        taken = blocks.index_select(0, self.table_nB.flatten())
        return taken.view(count, width * BLOCK, *blocks.shape[2:]).transpose(1, 2)


@dataclass(frozen=True)
class CachedRows:
    """Where the rows of one forward pass are written in the cache, and what they read."""

    block_T: Tensor
    offset_T: Tensor
    fresh_rows: Tensor | None  # of spans that begin a sequence; None: all
    fresh: Packing | None
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "CachedRows":
        positions = [position for span in spans for position in range(span.start, span.stop)]
        blocks = [span.blocks[position // BLOCK] for span in spans for position in range(span.start, span.stop)]
        lengths = [span.stop - span.start for span in spans]
        firsts = list(accumulate(lengths, initial=0))[:-1]
        fresh = [index for index, span in enumerate(spans) if span.start == 0]
        rows = [firsts[index] + step for index in fresh for step in range(lengths[index])]
        return cls(
            torch.tensor(blocks).to(device),
            torch.tensor([position % BLOCK for position in positions]).to(device),
            None if len(fresh) == len(spans) else torch.tensor(rows, dtype=torch.long).to(device),
            Packing.from_lengths(tuple(lengths[index] for index in fresh), device) if fresh else None,
            tuple(
                Group.of([spans[index] for index in members], [firsts[index] for index in members], device)
                for members in _alike(spans)
            ),
        )

    def layers(self, cache: KeyValueCache) -> tuple["CachedLayer", ...]:
        return tuple(CachedLayer(self, *pair) for pair in zip(cache.keys, cache.values, strict=True))


@dataclass(frozen=True)
class CachedLayer:
    """A :class:`~twinkle.model.decoder.attention.CachedAttention`."""

    rows: CachedRows
    keys: Tensor  # (B, BLOCK, J, D)
    values: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        rows = self.rows
        for kept, new in ((self.keys, key), (self.values, value)):
            kept.index_put_((rows.block_T, rows.offset_T), new[0].transpose(0, 1))
        if rows.fresh is not None and rows.fresh_rows is None:
            return attend_packed(query, key, value, rows.fresh, scale, window, softcap)
        out_THD = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        if rows.fresh is not None:
            q, k, v = (x[:, :, rows.fresh_rows] for x in (query, key, value))
            out_THD[rows.fresh_rows] = attend_packed(q, k, v, rows.fresh, scale, window, softcap)[0]
        for group in rows.groups:
            out_THD[group.rows_nC.flatten()] = self._attend_group(query[0], group, scale, window, softcap)
        return out_THD.unsqueeze(0)

    def _attend_group(
        self, q_HTD: Tensor, group: Group, scale: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        """(n·C, H, D)."""
        count, steps = group.rows_nC.shape
        k, v, mask = group.read(self.keys), group.read(self.values), group.mask(window)
        # (H, n·C, D) → (n, H, C, D)
        q = q_HTD[:, group.rows_nC.flatten()].unflatten(1, (count, steps)).transpose(0, 1)
        if steps == 1:  # the query heads of a key/value head become its rows: keys need not be repeated for them
            q = q.reshape(count, k.shape[1], -1, q.shape[3])
        if q.device.type == "cpu":  # as in training
            q, k, v = q.float(), k.float(), v.float()
        if softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=steps > 1)
        else:
            out = softcapped_attention(q, k, v, mask, scale, softcap)
        out_nHCD = out.to(q_HTD.dtype).reshape(count, q_HTD.shape[0], steps, v.shape[3])
        return out_nHCD.transpose(1, 2).flatten(0, 1)


def _alike(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Indices of spans that read the cache, in groups of equal size and like length."""
    reading = [index for index, span in enumerate(spans) if span.start > 0]
    reading.sort(key=lambda index: (spans[index].stop - spans[index].start, -spans[index].stop))
    group: list[int] = []
    keys = 0
    for index in reading:
        span = spans[index]
        if group:
            longest = spans[group[0]]
            same = span.stop - span.start == longest.stop - longest.start
            if not same or (len(group) + 1) * longest.stop > _MOST_PADDING * (keys + span.stop):
                yield group
                group, keys = [], 0
        group.append(index)
        keys += span.stop
    if group:
        yield group


@dataclass
class ShapeProbe:
    """Stands in for a layer's cache once, to see what the layer would keep."""

    packing: Packing
    shape: LayerShape | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        self.shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return attend_packed(query, key, value, self.packing, scale, window, softcap)
