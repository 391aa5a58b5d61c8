"""One micro-batch on the device: token rows, sequence bounds, the adapters of each request and room for its gradient.

Shapes: T tokens, N sequences, L length of the longest (padded batches are N × L rows), K targets per token, G requests
of a segment, P parameters of an adapter's row.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinkle.images import position_axes
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.csr import Csr
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.attention import Packing
from twinkle.model.decoder.experts.replay import PassRoutes
from twinkle.model.decoder.head import HeadQuery, clip_lora
from twinkle.model.decoder.layers import GiveWay, LayerBatch, bind_layers
from twinkle.model.decoder.linear_attention.bounds import Bounds
from twinkle.model.decoder.linear_attention.layer import PackedRows
from twinkle.model.decoder.lora.dropout import DropoutDraw, RowDropout
from twinkle.model.decoder.lora.grouped import Groups
from twinkle.model.decoder.lora.segments import BoundLora, Segment, SegmentLora
from twinkle.model.decoder.lora.stacks import RowLayout
from twinkle.model.decoder.transfer import HostCopy, to_device
from twinkle.model.objectives.custom_loss import CustomPart, Evaluation
from twinkle.model.objectives.objective import LossPart
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.types import OutputKind
from twinkle.model.vision.feature_store import FeatureStore
from twinkle.model.vision.splice import ImagePart, image_rows


@dataclass(frozen=True)
class Part:
    """The sequences of one request that are in a micro-batch; ``index`` is the request's place in the call.

    ``evaluation`` is set if the request has an objective instead of a named loss. It identifies sequences by their
    ``numbers``, their places in the request.
    """

    index: int
    item: CheckedItem
    adapter: Adapter | None  # None: the base model, which is never trained
    data: tuple[CheckedDatum, ...]
    evaluation: Evaluation | None = None
    numbers: tuple[int, ...] = ()  # of ``data`` within the request; needed where there is an evaluation or dropout
    dropout: DropoutDraw | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(datum.tokens) for datum in self.data)

    def dropout_keys(self, draw: DropoutDraw, length: int | None = None) -> tuple[float, NDArray[np.uint32]]:
        """Return the probability and the row keys of dropout. ``length``: that of each sequence with its padding."""
        lengths = self.lengths if length is None else (length,) * len(self.data)
        return draw.probability, np.concatenate([*map(draw.keys, self.numbers, lengths)])

    def by_width(self) -> Iterator[tuple[tuple[int, OutputKind], LossPart]]:
        """Yield ((K, output), LossPart) for each stretch of neighbouring sequences with K targets per token."""
        for width, run in groupby(range(len(self.data)), key=lambda place: self.data[place].width):
            places = list(run)
            data = [self.data[place] for place in places]
            custom = None
            if self.evaluation is not None:
                numbers = [self.numbers[place] for place in places]
                shapes = [(1,) if self.item.output == "embeddings" else datum.target_shape for datum in data]
                custom = CustomPart(self.evaluation, numbers, shapes, self.item.columns)
            yield (width, self.item.output), LossPart(self.item, data, custom)


@dataclass(frozen=True)
class Block:
    """Neighbouring rows that all have K targets and the same output. The head computes one block after another.

    Rows are not padded to the largest K of the batch: a row with one target costs the same beside rows with 1000.
    """

    rows: slice
    targets_nK: Tensor
    query: HeadQuery
    lora: tuple[BoundLora, ...]  # LoRA on the head; rows are counted from the block's first row
    parts: tuple[LossPart, ...]
    last_rows: Tensor | None = None  # where embeddings are asked for: the row of each sequence's last token

    @property
    def width(self) -> int:
        return self.targets_nK.shape[1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return how many rows of values each of the block's sequences has."""
        return tuple(length for part in self.parts for length in part.lengths)


@dataclass(frozen=True)
class DeviceBatch:
    """The tensors of one micro-batch on the device: arguments of the decoder's forward, and input of the head."""

    input_ids: Tensor  # (1, T) packed or (N, L) padded
    position_ids: Tensor  # like input_ids; with images (4, …): index in the sequence, then time, row and column
    attention_mask: Tensor | None
    layer_batch: LayerBatch
    real_rows_T: Tensor | None  # padded batches: the indices of the rows that hold tokens
    rows: int  # number of rows that hold tokens
    blocks: tuple[Block, ...]
    gradients: tuple["GradientRows", ...]

    def recorded_routes(self, layers: int) -> Tensor | None:
        """Return the routes of the rows that hold tokens, after a pass that has recorded them; None: it has not."""
        routes = self.layer_batch.routes
        if routes is None or not routes.records:
            return None
        recorded_TLK = routes.recorded(layers)
        return recorded_TLK if self.real_rows_T is None else recorded_TLK[self.real_rows_T]


@dataclass(frozen=True)
class GradientRows:
    """The gradients of neighbouring requests whose adapters share a stack. Layers add to them; they begin as zeros."""

    layout: RowLayout
    rows_GP: Tensor  # fp32


@dataclass(frozen=True)
class HeadBatch:
    """What remains to be done around a captured pass through the decoder: the head's blocks, and room for gradients."""

    blocks: tuple[Block, ...]
    gradients: tuple[GradientRows, ...]  # empty if nothing is trained


def build_head_batch(parts: Sequence[Part], architecture: Architecture, device: torch.device, train: bool) -> HeadBatch:
    """Build the head's part of a packed micro-batch without dropout."""
    head_lora, gradients = [], []
    for _, wearers, _, segment in _segments(parts, None):
        if wearers:
            layout = wearers[0].layout
            rows_GP = torch.zeros(len(wearers), layout.size, device=device) if train else None
            if rows_GP is not None:
                gradients.append(GradientRows(layout, rows_GP))
            if layout.has(architecture.head.name):
                weights_GP = wearers[0].stack.gather(_slots(wearers))
                lora = SegmentLora(segment, layout, weights_GP, rows_GP)
                head_lora.append(lora.bound(architecture.head.name))
    return HeadBatch(tuple(_blocks(parts, head_lora, _query(parts, device), device)), tuple(gradients))


def build_batch(
    parts: Sequence[Part],
    architecture: Architecture,
    device: torch.device,
    *,
    train: bool,
    recompute: bool,
    give_way: GiveWay | None = None,
    features: FeatureStore | None = None,
) -> DeviceBatch:
    """Build one micro-batch. ``features``: those of images; sequences with images need it.

    With ``give_way`` the batch copies the adapters' compute copies, because other calls may page the adapters out while
    this pass is interrupted.
    """
    data = [datum for part in parts for datum in part.data]
    lengths = tuple(len(datum.tokens) for datum in data)
    rows_per_sequence = max(lengths) if architecture.padded else None
    adapters, head_lora = [], []
    for members, wearers, segment, head_segment in _segments(parts, rows_per_sequence):
        if not wearers:  # requests of the base model: rows outside all segments get no LoRA
            continue
        lora = _segment_lora(wearers, segment, train, copy=give_way is not None)
        lora = dataclasses.replace(lora, dropout=_row_dropout(members, device, rows_per_sequence))
        adapters.append(lora)
        if lora.layout.has(architecture.head.name):
            dropout = lora.dropout if rows_per_sequence is None else _row_dropout(members, device)
            bound = lora.bound(architecture.head.name)
            head_lora.append(dataclasses.replace(bound, segment=head_segment, dropout=dropout))
    tokens = [datum.tokens for datum in data]
    ids, positions, mask, real_rows = _padded(tokens) if architecture.padded else _packed(tokens)
    packing = None if architecture.padded else Packing.from_lengths(lengths, device)
    rows = PackedRows(Bounds.from_lengths(lengths, device)) if architecture.has_linear_attention else None
    images = None
    if features is not None and any(datum.images for datum in data):
        images = image_rows(features, _image_parts(data, rows_per_sequence))
        positions = _axes(data, positions, rows_per_sequence)
    return DeviceBatch(
        to_device(ids, device),
        to_device(positions, device),
        None if mask is None else to_device(mask, device),
        LayerBatch(
            packing,
            bind_layers(adapters, architecture),
            recompute,
            give_way,
            images=images,
            routes=_routes(parts, architecture, rows_per_sequence, device),
            rows=rows,
        ),
        None if real_rows is None else to_device(real_rows, device),
        sum(lengths),
        tuple(_blocks(parts, head_lora, _query(parts, device), device)),
        tuple(GradientRows(lora.layout, lora.gradient_GP) for lora in adapters if lora.gradient_GP is not None),
    )


def _segments(
    parts: Sequence[Part], rows_per_sequence: int | None
) -> Iterator[tuple[list[Part], list[Adapter], Segment, Segment]]:
    """Yield neighbouring parts of one stack, their adapters, and their rows: in the decoder, and in the head.

    ``rows_per_sequence``: of a padded batch, in which sequences have more rows in the decoder than in the head; else
    None.
    """
    row = head_row = 0
    for _, run in groupby(parts, key=_segment_key):
        members = list(run)
        segment = head_segment = _segment(head_row, [sum(part.lengths) for part in members])
        if rows_per_sequence is not None:
            segment = _segment(row, [len(part.data) * rows_per_sequence for part in members])
        row, head_row = segment.stop, head_segment.stop
        yield members, [part.adapter for part in members if part.adapter is not None], segment, head_segment


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one request, (P,) fp32; ``finite`` is False if it holds NaN or infinity, or its sum overflows."""

    index: int
    row_P: Tensor
    finite: bool

    def added_to(self, before: "GradientRow | None") -> "GradientRow":
        """Return the sum of two gradients of one request. That of finite ones may overflow."""
        if before is None:
            return self
        row_P = before.row_P + self.row_P
        return GradientRow(self.index, row_P, before.finite and self.finite and bool(row_P.sum().isfinite()))


@dataclass(frozen=True)
class Gradients:
    """The gradients of a micro-batch, one row per request. :meth:`rows` waits until the device has computed them."""

    indices: tuple[int, ...]  # of the requests
    rows_P: tuple[Tensor, ...]
    finite: HostCopy

    def rows(self) -> list[GradientRow]:
        return list(map(GradientRow, self.indices, self.rows_P, self.finite.array().tolist()))


def harvest(gradients: Sequence[GradientRows], parts: Sequence[Part]) -> Gradients:
    """Collect the gradients with respect to the master weights. Called after the backward pass."""
    rows: list[Tensor] = []
    sums: list[Tensor] = []
    adapters = (part.adapter for part in parts if part.adapter is not None)
    for each in gradients:
        _scale_gradients(each.layout, each.rows_GP, list(islice(adapters, len(each.rows_GP))))
        rows += each.rows_GP
        sums.append(each.rows_GP.sum(1))  # one NaN or infinity anywhere makes the sum non-finite
    indices = tuple(part.index for part in parts if part.adapter is not None)
    finite = torch.cat(sums).isfinite() if sums else torch.empty(0, dtype=torch.bool)
    return Gradients(indices, tuple(rows), HostCopy.start(finite))


def _scale_gradients(layout: RowLayout, gradient_GP: Tensor, adapters: Sequence[Adapter]) -> None:
    """Multiply gradients of B by the scaling: compute copies hold B times the scaling, master weights hold B alone."""
    scaling_G = [1.0 if adapter.scaling is None else adapter.scaling for adapter in adapters]
    if set(scaling_G) != {1.0}:
        b_rows = gradient_GP[:, layout.a_size :]
        b_rows.mul_(to_device(torch.tensor(scaling_G).unsqueeze(1), b_rows.device))
    for adapter, row_P in zip(adapters, gradient_GP, strict=True):
        if adapter.scaling is None:
            adapter.scale_b(row_P)


def _blocks(
    parts: Sequence[Part], lora: Sequence[BoundLora], query: HeadQuery, device: torch.device
) -> Iterator[Block]:
    pieces = (piece for part in parts for piece in part.by_width())
    start, count = 0, sum(sum(part.lengths) for part in parts)
    for (width, output), run in groupby(pieces, key=lambda piece: piece[0]):
        members = tuple(part for _, part in run)
        data = [datum for part in members for datum in part.data]
        rows = slice(start, start + sum(len(datum.tokens) for datum in data))
        start = rows.stop
        own = lora
        if rows != slice(0, count):
            own = [clipped for each in lora if (clipped := clip_lora(each, rows.start, rows.stop)) is not None]
        targets, asked = torch.from_numpy(_targets(data, width)), query.for_rows(rows)
        if output == "logits":
            asked = dataclasses.replace(asked, logits=True)
        last_rows = None
        if output == "embeddings":
            last_rows = to_device(torch.tensor([len(datum.tokens) for datum in data]).cumsum(0) - 1, device)
        yield Block(rows, to_device(targets, device), asked, tuple(own), members, last_rows)


def _targets(data: Sequence[CheckedDatum], width: int) -> np.ndarray:
    """Return the targets (n, K) of sequences that all have K per token; cells that a sparse datum omits are token 0."""
    targets_nK, row = np.zeros((sum(len(datum.targets) for datum in data), width), np.int64), 0
    for datum in data:
        rows = targets_nK[row : row + len(datum.targets)]
        if isinstance(datum.targets, Csr):
            datum.targets.write_to(rows)
        else:
            rows[:] = datum.targets
        row += len(rows)
    return targets_nK


def _segment_key(part: Part) -> tuple[int | None, bool]:
    """Return what the parts of one segment have in common: the stack of their adapters, and whether they drop out."""
    return None if part.adapter is None else id(part.adapter.stack), part.dropout is not None


def _row_dropout(
    parts: Sequence[Part], device: torch.device, rows_per_sequence: int | None = None
) -> RowDropout | None:
    """Return the dropout of the rows of a segment; None if its parts have none."""
    drawn = [part.dropout_keys(part.dropout, rows_per_sequence) for part in parts if part.dropout is not None]
    return RowDropout.from_keys(drawn, device) if drawn else None


def _segment(start: int, sizes: Sequence[int]) -> Segment:
    return Segment(start, start + sum(sizes), Groups(tuple(sizes)))


def _query(parts: Sequence[Part], device: torch.device) -> HeadQuery:
    statistics = any(part.item.statistics for part in parts)
    if all(part.item.temperature == 1.0 for part in parts):
        return HeadQuery(statistics)
    sharpness = np.repeat([1 / part.item.temperature for part in parts], [sum(part.lengths) for part in parts])
    return HeadQuery(statistics, to_device(torch.from_numpy(sharpness.astype(np.float32))[:, None], device))


def _segment_lora(adapters: Sequence[Adapter], segment: Segment, train: bool, *, copy: bool) -> SegmentLora:
    stack = adapters[0].stack
    weights_GP = stack.gather(_slots(adapters), copy=copy)
    # It starts as zeros: layers add to it, and the part of a layer that the model never runs must stay zero.
    gradient_GP = torch.zeros(weights_GP.shape, device=weights_GP.device) if train else None
    return SegmentLora(segment, stack.layout, weights_GP, gradient_GP)


def _slots(adapters: Sequence[Adapter]) -> list[int]:
    slots = [adapter.slot for adapter in adapters if adapter.slot is not None]
    assert len(slots) == len(adapters), "adapters of a batch must be resident"
    return slots


def _packed(tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, None, None]:
    positions = np.concatenate([np.arange(len(row)) for row in tokens])
    return torch.from_numpy(np.concatenate(tokens))[None], torch.from_numpy(positions)[None], None, None


def _padded(tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, positions, mask and rows of tokens. Padding is on the right, where causal layers never look."""
    longest = max(len(row) for row in tokens)
    ids = np.zeros((len(tokens), longest), np.int64)
    mask = np.zeros((len(tokens), longest), np.int64)
    for index, row in enumerate(tokens):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    positions = torch.arange(longest).expand(len(tokens), longest)
    return torch.from_numpy(ids), positions, torch.from_numpy(mask), torch.from_numpy(mask.reshape(-1).nonzero()[0])


def _routes(
    parts: Sequence[Part], architecture: Architecture, rows_per_sequence: int | None, device: torch.device
) -> PassRoutes | None:
    """Return the routes that a pass replays or records; None if its routers choose, and nobody asks what they chose."""
    data = [datum for part in parts for datum in part.data]
    records = any(part.item.records_routes for part in parts)
    if all(datum.routes is None for datum in data):
        return PassRoutes(None, records) if records else None
    spec = architecture.routing
    assert spec is not None, "requests with routes are refused without it"
    lengths = [len(datum.tokens) if rows_per_sequence is None else rows_per_sequence for datum in data]
    given_TLK, start = np.full((sum(lengths), spec.layers, spec.chosen), -1, np.int16), 0
    for datum, length in zip(data, lengths, strict=True):
        if datum.routes is not None:
            given_TLK[start : start + len(datum.routes)] = datum.routes
        start += length
    return PassRoutes(to_device(torch.from_numpy(given_TLK), device), records)


def _image_parts(data: Sequence[CheckedDatum], rows_per_sequence: int | None) -> list[ImagePart]:
    """Return all images, each with its first row. ``rows_per_sequence``: of a padded batch; else None."""
    parts, start = [], 0
    for datum in data:
        parts += [ImagePart.whole(image, start + image.first) for image in datum.images]
        start += len(datum.tokens) if rows_per_sequence is None else rows_per_sequence
    return parts


def _axes(data: Sequence[CheckedDatum], positions: Tensor, rows_per_sequence: int | None) -> Tensor:
    """Return positions on four axes: the index in the sequence, as ``positions`` has it, then time, row and column."""
    axes = []
    for datum in data:
        images = [(image.first, image.rows, image.columns) for image in datum.images]
        own = position_axes(len(datum.tokens), images)
        rows = own.shape[1] if rows_per_sequence is None else rows_per_sequence
        axes.append(np.pad(own, ((0, 0), (0, rows - own.shape[1]))))
    joined = torch.from_numpy(np.concatenate(axes, 1)).view(3, *positions.shape)
    return torch.cat([positions[None], joined])
