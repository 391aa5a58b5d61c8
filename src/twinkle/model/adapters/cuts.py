"""Adapters on a base model that is cut: by tensor parallelism within layers, by pipeline parallelism between them.

Each process holds the adapters' rows (weights, optimizer state, gradient, compute copy) of its own part of the model
only: of the target modules of its own layers, and of each module one factor whole and a cut of the other one.

    divided by outputs (q, k, v, gate, up, head)   y_cut = x W_cut.T + (x A.T) B_cut.T     A whole, rows of B cut
    divided by inputs (o, down)                    y = Σ x_cut W_cut.T + (x_cut A_cut.T) B.T   columns of A cut, B whole

So a pass communicates nothing beyond what the base model needs. The gradient of a whole factor is then a sum of parts,
one on each process; :meth:`AdapterCuts.unite` adds them up once per optimizer step. Whole factors stay equal on all
processes, because all take the same steps with the same gradient.

Whatever leaves the trainer (snapshots, checkpoints, PEFT files) is whole, in the layout of one process with the whole
model. Cutting and gathering change no bit; an optimizer step may round the last bits of a cut row in another way.

Shapes: P parameters of a row, R bucket rank, I input and O output features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.stacks import Cut, RowLayout, Target
from twinkle.model.parallel import ALONE, Ranks

Side = Literal["inputs", "outputs"]

# By which side tensor parallelism divides a linear layer, by the last part of its name. The head is added by its name.
_SIDES: dict[str, Side] = {
    "q_proj": "outputs",
    "k_proj": "outputs",
    "v_proj": "outputs",
    "gate_proj": "outputs",
    "up_proj": "outputs",
    "o_proj": "inputs",
    "down_proj": "inputs",
}


class AdapterCuts(Protocol):
    """How adapters are distributed over processes. ``layout`` is always that of this process's own rows.

    :meth:`gather` and :meth:`unite` are collective: all processes call them with the same adapter.
    """

    @property
    def model(self) -> Ranks:
        """Return the ranks that hold the cuts of one adapter, and so of one copy of the base model."""
        ...

    def own(self, whole: RowLayout) -> RowLayout:
        """Return the layout of the rows that this process holds of an adapter; it may have no targets."""
        ...

    def cut(self, whole_P: Tensor, layout: RowLayout) -> Tensor:
        """Return this process's part of a whole row. If nothing is cut, it is the row itself."""
        ...

    def gather(self, own_P: Tensor, layout: RowLayout) -> Tensor:
        """Return the whole row (fp32) from the parts of all processes. If nothing is cut, it is ``own_P`` itself."""
        ...

    def unite(self, gradient_P: Tensor, layout: RowLayout) -> None:
        """Add up the parts that processes have computed of a gradient, in place.

        These are the parts of whole factors, and the parts of different sequences.
        """
        ...

    def counted(self, row_P: Tensor, layout: RowLayout) -> Tensor:
        """Return the numbers of a row that count for this process in a sum over :attr:`model`.

        Each number of the whole adapter counts on one process.
        """
        ...


class WholeAdapters:
    """No cuts: every process has whole adapters. ``data``: the ranks that compute different sequences."""

    model: Ranks = ALONE

    def __init__(self, data: Ranks) -> None:
        self._data = data

    def own(self, whole: RowLayout) -> RowLayout:
        return whole

    def cut(self, whole_P: Tensor, layout: RowLayout) -> Tensor:
        return whole_P

    def gather(self, own_P: Tensor, layout: RowLayout) -> Tensor:
        return own_P

    def unite(self, gradient_P: Tensor, layout: RowLayout) -> None:
        self._data.add_up(gradient_P)

    def counted(self, row_P: Tensor, layout: RowLayout) -> Tensor:
        return row_P


WHOLE: AdapterCuts = WholeAdapters(ALONE)


@dataclass(frozen=True)
class Placement:
    """Where a target module is: the number of its pipeline stage, and by which side it is divided there.

    ``padded``: whether its outputs are padded to a multiple of the number of tensor parallel ranks, as a vocabulary is.
    """

    stage: int
    side: Side
    padded: bool = False


def place_targets(architecture: Architecture, stages: Sequence[range]) -> Callable[[Target], Placement]:
    """Return where the targets of a decoder are. ``stages``: the decoder layers of each pipeline stage.

    The head is on the last stage.
    """
    stage_of_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}

    def place(target: Target) -> Placement:
        if target.name == architecture.head.name:
            return Placement(len(stages) - 1, "outputs", padded=True)
        layer, _, rest = target.name.removeprefix(architecture.layers_path + ".").partition(".")
        side = _SIDES.get(rest.rpartition(".")[2])
        if side is None:
            raise UnsupportedError(f"target_modules: got {target.name}, which is not cut; allowed: {sorted(_SIDES)}")
        return Placement(stage_of_layer[int(layer)], side)

    return place


class ModelCuts:
    """The cuts of this process: one stage of a pipeline, one rank of tensor parallelism."""

    def __init__(
        self, place: Callable[[Target], Placement], *, tensor: Ranks, pipeline: Ranks, model: Ranks, data: Ranks
    ) -> None:
        """``model``: the ranks of ``tensor`` × ``pipeline``. ``data``: the ranks that hold the same cut as this one."""
        self.model = model
        self._place = place
        self._tensor = tensor
        self._pipeline = pipeline
        self._data = data
        self._layouts: dict[str, RowLayout] = {}  # by the digest of the whole layout

    def own(self, whole: RowLayout) -> RowLayout:
        assert whole.cut is None, "it is cut already"
        if self._tensor.size == self._pipeline.size == 1:
            return whole
        if whole.digest not in self._layouts:
            self._layouts[whole.digest] = self._own(whole)
        return self._layouts[whole.digest]

    def _own(self, whole: RowLayout) -> RowLayout:
        stages = [self._stage(whole, stage) for stage in range(self._pipeline.size)]
        targets, buckets = stages[self._pipeline.number]
        sizes = (
            sum(bucket * (t.in_features + t.out_features) for t, bucket in zip(*stage, strict=True)) for stage in stages
        )
        rank = max(buckets, default=whole.rank)
        ranks = None if whole.ranks is None else buckets
        plain = RowLayout(rank, targets, ranks)
        shared = tuple(sorted(self._shared(plain), key=lambda part: part.start))
        cut = Cut(whole, max(sizes), shared, counts_shared=self._tensor.number == 0)
        return RowLayout(rank, targets, ranks, cut)

    def _stage(self, whole: RowLayout, stage: int) -> tuple[tuple[Target, ...], tuple[int, ...]]:
        """Return the targets of a stage, with the sizes of their cuts, and their buckets. Ranks have equal sizes."""
        there = [
            (self._cut_target(target), bucket)
            for target, bucket in zip(whole.targets, whole.buckets, strict=True)
            if self._place(target).stage == stage
        ]
        return tuple(target for target, _ in there), tuple(bucket for _, bucket in there)

    def _cut_target(self, target: Target) -> Target:
        place, parts = self._place(target), self._tensor.size
        divided = target.in_features if place.side == "inputs" else target.out_features
        if divided % parts and not place.padded:
            raise UnsupportedError(
                f"tp_size: got {parts}, allowed: a divisor of {divided}, the {place.side} of {target.name}"
            )
        size = -(-divided // parts)
        if place.side == "inputs":
            return Target(target.name, size, target.out_features, first_input=self._tensor.number * size)
        return Target(target.name, target.in_features, size)

    def _shared(self, layout: RowLayout) -> Iterator[range]:
        """Yield the ranges of the whole factors in this process's row."""
        if self._tensor.size == 1:
            return
        for target in layout.targets:
            a, b = layout.offsets(target.name)
            bucket = layout.bucket(target.name)
            if self._place(target).side == "inputs":
                yield range(b, b + bucket * target.out_features)
            else:
                yield range(a, a + bucket * target.in_features)

    def cut(self, whole_P: Tensor, layout: RowLayout) -> Tensor:
        if layout.cut is None:
            return whole_P
        own_P = whole_P.new_zeros(layout.size)
        for own, whole in self._pairs(own_P, whole_P, layout, shared=True):
            own.copy_(whole)
        return own_P

    def gather(self, own_P: Tensor, layout: RowLayout) -> Tensor:
        if layout.cut is None:
            return own_P
        assert own_P.dtype == torch.float32, "it is added up as 32-bit integers"
        whole_P = own_P.new_zeros(layout.whole.size)
        for own, whole in self._pairs(own_P, whole_P, layout, shared=layout.cut.counts_shared):
            whole.copy_(own)
        # Every number is written by one rank. As integers the zeros of the others leave all its bits alone, while a sum
        # of floats would turn −0 into 0.
        self.model.add_up(whole_P.view(torch.int32))
        return whole_P

    def _pairs(
        self, own_P: Tensor, whole_P: Tensor, layout: RowLayout, *, shared: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of this process's row beside views of the same numbers in the whole row.

        The padding of a vocabulary is in no view. ``shared``: also those of whole factors.
        """
        for target in layout.targets:
            (own_a_RI, own_b_OR), (a_RI, b_OR) = (
                layout.views(own_P, target.name),
                layout.whole.views(whole_P, target.name),
            )
            if self._place(target).side == "inputs":
                start = self._tensor.number * target.in_features
                yield own_a_RI, a_RI[:, start : start + target.in_features]
                if shared:
                    yield own_b_OR, b_OR
            else:
                start = self._tensor.number * target.out_features
                real = b_OR[start : start + target.out_features]
                yield own_b_OR[: len(real)], real
                if shared:
                    yield own_a_RI, a_RI

    def unite(self, gradient_P: Tensor, layout: RowLayout) -> None:
        if self._tensor.size > 1 and layout.cut is not None and layout.cut.shared:
            parts = [gradient_P[each.start : each.stop] for each in layout.cut.shared]
            flat = torch.cat(parts)
            self._tensor.add_up(flat)
            for part, total in zip(parts, flat.split([len(part) for part in parts]), strict=True):
                part.copy_(total)
        if len(gradient_P):
            self._data.add_up(gradient_P)

    def counted(self, row_P: Tensor, layout: RowLayout) -> Tensor:
        if layout.cut is None or layout.cut.counts_shared:
            return row_P
        ends = [0, *(end for each in layout.cut.shared for end in (each.start, each.stop)), len(row_P)]
        return torch.cat([row_P[start:stop] for start, stop in zip(ends[::2], ends[1::2], strict=True)])
