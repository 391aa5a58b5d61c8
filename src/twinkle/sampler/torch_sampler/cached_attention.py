"""Attention of new tokens to each other and to the cached keys and values of their sequences.

One forward pass computes a span of each sequence: the beginning of a prompt, a later piece of a prompt, or the token
drawn last. A span that begins a sequence attends only to itself, by the same code as in training. All other spans read
keys and values back from the cache; spans of similar length are read together, padded to the longest.

Shapes: T rows, n spans of a group, C rows of a span, L keys, H query heads, J key/value heads, D head
dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twinkle.model.decoder.attention import Packing, attend_packed, plain_attention
from twinkle.model.decoder.transfer import to_device
from twinkle.sampler.torch_sampler.cache import BLOCK, KeyValueCache, LayerShape, blocks_for

_MOST_PADDING = 2  # a padded group may read at most this many times its real keys


@dataclass(frozen=True)
class Span:
    """Tokens ``start``…``stop`` of a sequence, and the cache blocks of that sequence.

    shift: position − index of the tokens, for rotary embeddings; it is not 0 behind images. The cache is by index.
    """

    start: int
    stop: int
    blocks: Sequence[int]
    shift: int = 0


@dataclass(frozen=True)
class Group:
    """Spans of C rows each that read the cache together."""

    rows_nC: Tensor
    table_nB: Tensor
    positions_nC: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window; layers with the same window share a mask

    @classmethod
    def for_spans(cls, spans: Sequence[Span], first_rows: Sequence[int], device: torch.device) -> "Group":
        """Build a group of spans of equal size. ``first_rows``: the row of the pass at which each span starts."""
        width, count = blocks_for(max(span.stop for span in spans)), spans[0].stop - spans[0].start
        tables = [[*span.blocks[:width], *[0] * (width - len(span.blocks))] for span in spans]
        steps_C = torch.arange(count)
        return cls(
            to_device(torch.tensor(first_rows)[:, None] + steps_C, device),
            to_device(torch.tensor(tables), device),
            to_device(torch.tensor([span.start for span in spans])[:, None] + steps_C, device),
        )

    def mask(self, window: int | None) -> Tensor:
        """Return the attention mask (n, 1, C, L): True for a row's own key and earlier keys within the window."""
        if window not in self.masks:
            keys_L = torch.arange(self.table_nB.shape[1] * BLOCK, device=self.table_nB.device)
            distance_nCL = self.positions_nC[:, :, None] - keys_L
            allowed_nCL = distance_nCL >= 0
            if window is not None:
                allowed_nCL &= distance_nCL < window
            self.masks[window] = allowed_nCL.unsqueeze(1)
        return self.masks[window]

    def read(self, blocks: Tensor) -> Tensor:
        """Return the keys or values of these spans, (n, J, L, D), read from ``blocks`` (B, BLOCK, J, D)."""
        count, width = self.table_nB.shape
        taken = blocks.index_select(0, self.table_nB.flatten())
        return taken.view(count, width * BLOCK, *blocks.shape[2:]).transpose(1, 2)


@dataclass(frozen=True)
class CachedRows:
    """Where the rows of one forward pass are written in the cache, and what they read."""

    block_T: Tensor
    offset_T: Tensor
    fresh_rows: Tensor | None  # rows of the spans that begin a sequence; None: all rows
    fresh: Packing | None
    groups: tuple[Group, ...]

    @classmethod
    def for_spans(cls, spans: Sequence[Span], device: torch.device) -> "CachedRows":
        """Build the rows of a pass that computes these spans, in this order."""
        starts, lengths = (np.array(values, np.int64) for values in zip(*map(_bounds, spans), strict=True))
        firsts = np.cumsum(lengths) - lengths
        steps = np.arange(lengths.sum()) - np.repeat(firsts, lengths)  # of each row, within its span
        positions = steps + np.repeat(starts, lengths)
        sizes = np.array([len(span.blocks) for span in spans])
        first_blocks = np.repeat(np.cumsum(sizes) - sizes, lengths)
        blocks = np.concatenate([np.array(span.blocks, np.int64) for span in spans])[first_blocks + positions // BLOCK]
        fresh = starts == 0
        return cls(
            to_device(torch.from_numpy(blocks), device),
            to_device(torch.from_numpy(positions % BLOCK), device),
            None if fresh.all() else to_device(torch.from_numpy(np.flatnonzero(np.repeat(fresh, lengths))), device),
            Packing.from_lengths(tuple(lengths[fresh].tolist()), device) if fresh.any() else None,
            tuple(
                Group.for_spans([spans[index] for index in members], firsts[members].tolist(), device)
                for members in _alike(spans)
            ),
        )

    def layers(self, cache: KeyValueCache) -> tuple["CachedLayer", ...]:
        return tuple(CachedLayer(self, *pair) for pair in zip(cache.keys, cache.values, strict=True))


@dataclass(frozen=True)
class CachedLayer:
    """The cached attention of one layer; implements :class:`~twinkle.model.decoder.attention.CachedAttention`."""

    rows: CachedRows
    keys: Tensor  # (B, BLOCK, J, D)
    values: Tensor

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        rows = self.rows
        for kept, new in ((self.keys, key), (self.values, value)):
            kept.index_put_((rows.block_T, rows.offset_T), new[0].transpose(0, 1))
        if rows.fresh is not None and rows.fresh_rows is None:
            return attend_packed(query, key, value, rows.fresh, scale, window, softcap, sinks_H)
        out_THD = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        if rows.fresh is not None:
            q, k, v = (x[:, :, rows.fresh_rows] for x in (query, key, value))
            out_THD[rows.fresh_rows] = attend_packed(q, k, v, rows.fresh, scale, window, softcap, sinks_H)[0]
        for group in rows.groups:
            out_THD[group.rows_nC.flatten()] = self._attend_group(query[0], group, scale, window, softcap, sinks_H)
        return out_THD.unsqueeze(0)

    def _attend_group(
        self,
        q_HTD: Tensor,
        group: Group,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Return the attention outputs of one group's rows, (n·C, H, D)."""
        count, steps = group.rows_nC.shape
        k, v, mask = group.read(self.keys), group.read(self.values), group.mask(window)
        # (H, n·C, D) → (n, H, C, D)
        q = q_HTD[:, group.rows_nC.flatten()].unflatten(1, (count, steps)).transpose(0, 1)
        if steps == 1:  # treat the query heads of a key/value head as rows, so that keys are not repeated
            q = q.reshape(count, k.shape[1], -1, q.shape[3])
        if q.device.type == "cpu":  # compute in fp32, as in training
            q, k, v = q.float(), k.float(), v.float()
        if softcap is None and sinks_H is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=steps > 1)
        else:
            sinks = None
            if sinks_H is not None:  # with one step the heads of a key/value head are rows, otherwise there is one row
                sinks = sinks_H.view(k.shape[1], -1, 1) if steps == 1 else sinks_H[:, None, None]
            out = plain_attention(q, k, v, mask, scale, softcap, sinks)
        out_nHCD = out.to(q_HTD.dtype).reshape(count, q_HTD.shape[0], steps, v.shape[3])
        return out_nHCD.transpose(1, 2).flatten(0, 1)


def _bounds(span: Span) -> tuple[int, int]:
    """Return the first position of a span, and its length."""
    return span.start, span.stop - span.start


def _alike(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Yield the indices of spans that read the cache, in groups of equal size and similar length."""
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
    """Replaces a layer's cache for one pass, and records the shape of the keys and values the layer would store."""

    packing: Packing
    shape: LayerShape | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        self.shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return attend_packed(query, key, value, self.packing, scale, window, softcap, sinks_H)
