"""One micro-batch on the device: token rows, sequence bounds, and the adapters of each request as leaves of the graph.

Shapes: T tokens, N sequences, L longest of them (padded batches are N × L rows), K targets a token, G requests of a
segment, P parameters of an adapter's row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from twinkle.model.adapter import Adapter
from twinkle.model.architecture import Architecture
from twinkle.model.attention import Packing
from twinkle.model.grouped import Groups
from twinkle.model.head import HeadLora
from twinkle.model.layers import BoundLayer, LayerBatch, split_name
from twinkle.model.lora import BoundLora, Segment
from twinkle.model.stacks import RowLayout
from twinkle.model.validation import CheckedDatum, CheckedItem


@dataclass(frozen=True)
class Part:
    """Those sequences of one request that are in a micro-batch; ``index`` is the request's place in the call."""

    index: int
    item: CheckedItem
    adapter: Adapter
    data: tuple[CheckedDatum, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True)
class SegmentLora:
    """The adapters of consecutive requests that share a stack: one leaf pair (A, B) a target module."""

    layout: RowLayout
    indices: tuple[int, ...]  # of the requests
    scaling_G1: Tensor | None  # None where all are 1
    leaves: dict[str, BoundLora]
    gradient_GP: Tensor | None  # fp32; None when nothing is trained


@dataclass(frozen=True)
class DeviceBatch:
    """Arguments of the decoder's forward, and what the head needs."""

    input_ids: Tensor  # (1, T) packed or (N, L) padded
    position_ids: Tensor
    attention_mask: Tensor | None
    layer_batch: LayerBatch
    real_rows_T: Tensor | None  # padded: the rows that hold tokens
    targets_TK: Tensor
    segments: tuple[SegmentLora, ...]
    head_lora: tuple[HeadLora, ...]


def build_batch(
    parts: Sequence[Part], architecture: Architecture, device: torch.device, *, train: bool, recompute: bool
) -> DeviceBatch:
    data = [datum for part in parts for datum in part.data]
    lengths = tuple(len(datum.tokens) for datum in data)
    width = max(datum.targets.shape[1] for datum in data)
    rows_per_sequence = max(lengths) if architecture.padded else None
    segments, bounds, head_bounds = [], [], []
    row = head_row = 0
    runs = [list(run) for _, run in groupby(parts, key=lambda part: id(part.adapter.stack))]
    whole = len(runs) == 1
    for members in runs:
        head_sizes = tuple(sum(part.lengths) for part in members)
        sizes = (
            head_sizes if rows_per_sequence is None else tuple(len(part.data) * rows_per_sequence for part in members)
        )
        bounds.append(Segment(row, row + sum(sizes), Groups.of(sizes, device), whole))
        head_bounds.append(Segment(head_row, head_row + sum(head_sizes), Groups.of(head_sizes, device), whole))
        segments.append(_segment_lora(members, bounds[-1], architecture.head.name, device, train))
        row += sum(sizes)
        head_row += sum(head_sizes)
    tokens = [datum.tokens for datum in data]
    targets = np.concatenate([np.pad(d.targets, ((0, 0), (0, width - d.targets.shape[1]))) for d in data])
    ids, positions, mask, real_rows = _padded(tokens) if architecture.padded else _packed(tokens)
    packing = None if architecture.padded else Packing.of(lengths, device)
    return DeviceBatch(
        ids.to(device),
        positions.to(device),
        None if mask is None else mask.to(device),
        LayerBatch(packing, whole, _by_layer(segments, architecture), recompute),
        None if real_rows is None else real_rows.to(device),
        torch.from_numpy(targets).to(device),
        tuple(segments),
        _head_lora(segments, head_bounds, architecture.head.name),
    )


@dataclass(frozen=True)
class GradientRow:
    """What one request adds to its adapter's gradient, (P,) fp32, and whether all of it is finite."""

    index: int
    row_P: Tensor
    finite: bool


def harvest(batch: DeviceBatch) -> list[GradientRow]:
    """Collect the gradients after the backward pass."""
    indices: list[int] = []
    rows: list[Tensor] = []
    sums: list[Tensor] = []
    for segment in batch.segments:
        assert segment.gradient_GP is not None
        for name, lora in segment.leaves.items():
            if not lora.a_GRI.requires_grad:
                continue  # the head has added to its rows itself
            for place, leaf in zip(
                segment.layout.views(segment.gradient_GP, name), (lora.a_GRI, lora.b_GOR), strict=True
            ):
                if leaf.grad is None:  # the model never ran this layer
                    place.zero_()
                else:
                    place.copy_(leaf.grad)
                    leaf.grad = None
        if segment.scaling_G1 is not None:  # the leaves hold scaled B, the master weights unscaled
            segment.gradient_GP[:, segment.layout.a_size :].mul_(segment.scaling_G1)
        indices += segment.indices
        rows += segment.gradient_GP
        sums.append(segment.gradient_GP.sum(1))  # one NaN or infinity anywhere makes the sum so
    return list(map(GradientRow, indices, rows, torch.cat(sums).isfinite().tolist()))


def _segment_lora(parts: Sequence[Part], bound: Segment, head: str, device: torch.device, train: bool) -> SegmentLora:
    stack = parts[0].adapter.stack
    slots = [part.adapter.slot for part in parts]
    assert all(slot is not None for slot in slots), "adapters of a batch must be resident"
    rows_GP = stack.gather([slot for slot in slots if slot is not None])
    leaves = {}
    for target in stack.layout.targets:
        leaf = train and target.name != head  # the head's gradient does not come from autograd
        a_GRI, b_GOR = (view.detach().requires_grad_(leaf) for view in stack.layout.views(rows_GP, target.name))
        leaves[target.name] = BoundLora(bound, a_GRI, b_GOR)
    scalings = [part.adapter.spec.scaling for part in parts]
    scaling_G1 = None if set(scalings) == {1.0} else torch.tensor(scalings, device=device).unsqueeze(1)
    gradient_GP = torch.empty(rows_GP.shape, device=device) if train else None  # harvest fills it, the head adds
    return SegmentLora(stack.layout, tuple(part.index for part in parts), scaling_G1, leaves, gradient_GP)


def _by_layer(segments: Sequence[SegmentLora], architecture: Architecture) -> tuple[BoundLayer, ...]:
    layers: dict[int, dict[str, tuple[BoundLora, ...]]] = {}
    for segment in segments:
        for name, lora in segment.leaves.items():
            if name != architecture.head.name:
                index, short = split_name(name, architecture)
                layer = layers.setdefault(index, {})
                layer[short] = (*layer.get(short, ()), lora)
    return tuple(layers.get(index, {}) for index in range(architecture.layer_count))


def _head_lora(segments: Sequence[SegmentLora], bounds: Sequence[Segment], head: str) -> tuple[HeadLora, ...]:
    result = []
    for segment, bound in zip(segments, bounds, strict=True):
        if segment.layout.has(head):
            leaf = segment.leaves[head]
            lora = BoundLora(bound, leaf.a_GRI.detach(), leaf.b_GOR.detach())
            if segment.gradient_GP is None:
                result.append(HeadLora(lora))
            else:
                da_GRI, db_GOR = segment.layout.views(segment.gradient_GP, head)
                result.append(HeadLora(lora, da_GRI.zero_(), db_GOR.zero_()))
    return tuple(result)


def _packed(tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, None, None]:
    positions = np.concatenate([np.arange(len(row)) for row in tokens])
    return torch.from_numpy(np.concatenate(tokens))[None], torch.from_numpy(positions)[None], None, None


def _padded(tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padding goes to the right, where causal layers never look."""
    longest = max(len(row) for row in tokens)
    ids = np.zeros((len(tokens), longest), np.int64)
    mask = np.zeros((len(tokens), longest), np.int64)
    for index, row in enumerate(tokens):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    positions = torch.arange(longest).expand(len(tokens), longest)
    return torch.from_numpy(ids), positions, torch.from_numpy(mask), torch.from_numpy(mask.reshape(-1).nonzero()[0])
