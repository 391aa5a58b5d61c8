"""Adapters on a base model that is cut: by tensor parallelism within layers, by pipeline parallelism between them.

Each process holds the adapters' rows (weights, optimizer state, gradient, compute copy) of its own part of the model
only: of the target modules of its own layers, and of each module one factor whole and a cut of the other one.

    divided by outputs (q, k, v, gate, up, head)   y_cut = x W_cut.T + (x A.T) B_cut.T     A whole, rows of B cut
    divided by inputs (o, down)                    y = Σ x_cut W_cut.T + (x_cut A_cut.T) B.T   columns of A cut, B whole
    divided by experts (w1, w2, w3 of experts)     a factor that each expert has: those of this process's experts;
                                                   a factor that all experts share: whole

So a pass communicates nothing beyond what the base model needs. The gradient of a whole factor is then a sum of parts,
one on each process; :meth:`AdapterCuts.unite` adds them up once per optimizer step. Whole factors stay equal on all
processes, because all take the same steps with the same gradient.

Experts may be divided among processes with different data. The gradient of an expert's own factor is then complete
where the expert is, and the processes of one data rank do not hold a whole adapter.

Whatever leaves the trainer (snapshots, checkpoints, PEFT files) is whole, in the layout of one process with the whole
model. Cutting and gathering change no bit; an optimizer step may round the last bits of a cut row in another way.

Shapes: P parameters of a row, R bucket rank, I input and O output features, E experts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.linear_attention.layer import JOINT, PARTS
from twinkle.model.decoder.lora.stacks import Cut, RowLayout, Target
from twinkle.model.parallel import ALONE, Ranks, add_up_all

Side = Literal["inputs", "outputs", "experts"]

# By which side tensor parallelism divides a linear layer, by the last part of its name. The head is added by its name.
_SIDES: dict[str, Side] = {
    "q_proj": "outputs",
    "k_proj": "outputs",
    "v_proj": "outputs",
    "gate_proj": "outputs",
    "up_proj": "outputs",
    "o_proj": "inputs",
    "down_proj": "inputs",
    # Those of linear attention, in models that have no tensor parallelism
    **dict.fromkeys((JOINT, *PARTS, "in_proj_z", "in_proj_b", "in_proj_a"), "outputs"),
    "out_proj": "inputs",
}


class AdapterCuts(Protocol):
    """How adapters are distributed over processes. ``layout`` is always that of this process's own rows.

    :meth:`gather` and :meth:`unite` are collective: all processes call them with the same adapter.
    """

    def holders(self, layout: RowLayout) -> Ranks:
        """Return ranks that together hold all cuts of an adapter."""
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
        """Return the numbers of a row that count for this process in a sum over :meth:`holders`.

        Each number of the whole adapter counts on one process.
        """
        ...


class WholeAdapters:
    """No cuts: every process has whole adapters. ``data``: the ranks that compute different sequences."""

    def __init__(self, data: Ranks) -> None:
        self._data = data

    def holders(self, layout: RowLayout) -> Ranks:
        return ALONE

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
        if target.copies is not None:
            return Placement(stage_of_layer[int(layer)], "experts")
        side = _SIDES.get(rest.rpartition(".")[2])
        if side is None:
            raise UnsupportedError(f"target_modules: got {target.name}, which is not cut; allowed: {sorted(_SIDES)}")
        return Placement(stage_of_layer[int(layer)], side)

    return place


@dataclass(frozen=True)
class ExpertRanks:
    """How the experts of a layer are divided. ``owners``: among which ranks. ``same``: those with the same experts.

    ``counted``: of the ranks that hold a whole adapter together (``holders``), whether this one counts its experts.
    ``spread``: whether experts are divided among ranks with different data.
    """

    owners: Ranks = ALONE
    same: Ranks = ALONE
    holders: Ranks = ALONE
    counted: bool = True
    spread: bool = False


WHOLE_EXPERTS = ExpertRanks()


@dataclass(frozen=True)
class _Factor:
    """How this process holds the A or the B of a target: a part of it along a dimension of its view, or all of it.

    ``of_expert``: the part is that of this process's experts.
    """

    dim: int | None
    start: int = 0
    of_expert: bool = False


class ModelCuts:
    """The cuts of this process: one stage of a pipeline, one rank of tensor parallelism, some of the experts."""

    def __init__(
        self,
        place: Callable[[Target], Placement],
        *,
        tensor: Ranks,
        pipeline: Ranks,
        model: Ranks,
        data: Ranks,
        experts: ExpertRanks = WHOLE_EXPERTS,
    ) -> None:
        """``model``: the ranks of ``tensor`` × ``pipeline``. ``data``: the ranks with the same cut of linear layers."""
        self._place = place
        self._tensor = tensor
        self._pipeline = pipeline
        self._model = model
        self._data = data
        self._experts = experts
        self._layouts: dict[str, RowLayout] = {}  # by the digest of the whole layout

    def holders(self, layout: RowLayout) -> Ranks:
        if layout.cut is None:
            return ALONE
        return self._experts.holders if layout.cut.spread else self._model

    def own(self, whole: RowLayout) -> RowLayout:
        assert whole.cut is None, "it is cut already"
        experts = self._experts.owners.size * self._experts.same.size if whole.has_experts else 1
        if self._tensor.size == self._pipeline.size == 1 and experts == 1:
            return whole
        if whole.digest not in self._layouts:
            self._layouts[whole.digest] = self._own(whole)
        return self._layouts[whole.digest]

    def _own(self, whole: RowLayout) -> RowLayout:
        stages = [self._stage(whole, stage) for stage in range(self._pipeline.size)]
        targets, buckets = stages[self._pipeline.number]
        sizes = (sum(bucket * (t.a_rows + t.b_rows) for t, bucket in zip(*stage, strict=True)) for stage in stages)
        rank = max(buckets, default=whole.rank)
        ranks = None if whole.ranks is None else buckets
        plain = RowLayout(rank, targets, ranks)
        spread = whole.has_experts and self._experts.spread
        own = {target.name for target in targets}
        pairs = [
            pair
            for target in whole.targets
            if target.name in own
            for pair in zip(self._factors(target), plain.ranges(target.name), strict=True)
        ]
        cut = Cut(
            whole,
            max(sizes),
            shared=_joined(numbers for factor, numbers in pairs if factor.dim is None),
            of_experts=_joined(numbers for factor, numbers in pairs if factor.of_expert),
            uncounted=_joined(numbers for factor, numbers in pairs if not self._counts(factor, spread)),
            spread=spread,
        )
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
        if target.copies is not None:
            a, b = (count if count == 1 else count // self._experts.owners.size for count in target.copies)
            return replace(target, copies=(a, b))
        divided = target.in_features if place.side == "inputs" else target.out_features
        if divided % parts and not place.padded:
            raise UnsupportedError(
                f"tp_size: got {parts}, allowed: a divisor of {divided}, the {place.side} of {target.name}"
            )
        size = -(-divided // parts)
        if place.side == "inputs":
            return Target(target.name, size, target.out_features, first_input=self._tensor.number * size)
        return Target(target.name, target.in_features, size)

    def _factors(self, target: Target) -> tuple[_Factor, _Factor]:
        """Return how this process holds A and B of a target of the whole adapter."""
        side, number = self._place(target).side, self._tensor.number
        if target.copies is not None:
            a, b = map(self._of_experts, target.copies)
            return a, b
        size = self._cut_target(target)
        if side == "inputs":
            return _Factor(-1, number * size.in_features), _Factor(None)
        return _Factor(None), _Factor(-2, number * size.out_features)

    def _of_experts(self, count: int) -> _Factor:
        """Return how this process holds a factor of which there are so many; 1: all experts share it."""
        owners = self._experts.owners
        return _Factor(None) if count == 1 else _Factor(-3, owners.number * (count // owners.size), of_expert=True)

    def _counts(self, factor: _Factor, spread: bool) -> bool:
        """Return whether this process counts a factor, or its part of it, among the holders of the adapter."""
        if factor.of_expert:
            return self._experts.counted
        first = self._data.number == 0 or not spread
        return first and (factor.dim is not None or self._tensor.number == 0)

    def cut(self, whole_P: Tensor, layout: RowLayout) -> Tensor:
        if layout.cut is None:
            return whole_P
        own_P = whole_P.new_zeros(layout.size)
        for own, whole, _ in self._pairs(own_P, whole_P, layout):
            own.copy_(whole)
        return own_P

    def gather(self, own_P: Tensor, layout: RowLayout) -> Tensor:
        if layout.cut is None:
            return own_P
        assert own_P.dtype == torch.float32, "it is added up as 32-bit integers"
        whole_P = own_P.new_zeros(layout.whole.size)
        for own, whole, factor in self._pairs(own_P, whole_P, layout):
            if self._counts(factor, layout.cut.spread):
                whole.copy_(own)
        # Every number is written by one rank. As integers the zeros of the others leave all its bits alone, while a sum
        # of floats would turn −0 into 0.
        self.holders(layout).add_up(whole_P.view(torch.int32))
        return whole_P

    def _pairs(self, own_P: Tensor, whole_P: Tensor, layout: RowLayout) -> Iterator[tuple[Tensor, Tensor, _Factor]]:
        """Yield views of this process's row beside views of the same numbers in the whole row.

        The padding of a vocabulary is in no view.
        """
        targets = {target.name: target for target in layout.whole.targets}
        for target in layout.targets:
            pairs = zip(layout.views(own_P, target.name), layout.whole.views(whole_P, target.name), strict=True)
            for factor, (own, whole) in zip(self._factors(targets[target.name]), pairs, strict=True):
                if factor.dim is None:
                    yield own, whole, factor
                    continue
                start = min(factor.start, whole.shape[factor.dim])
                size = min(own.shape[factor.dim], whole.shape[factor.dim] - start)
                yield own.narrow(factor.dim, 0, size), whole.narrow(factor.dim, start, size), factor

    def unite(self, gradient_P: Tensor, layout: RowLayout) -> None:
        def add_up(ranks: Ranks, ranges: Iterable[range]) -> None:
            if ranks.size > 1:
                add_up_all(ranks, [gradient_P[each.start : each.stop] for each in ranges])

        if layout.cut is not None:
            add_up(self._tensor, layout.cut.shared)
        if layout.cut is not None and layout.cut.of_experts:
            add_up(self._experts.same, layout.cut.of_experts)
            add_up(self._data, _others(layout.cut.of_experts, len(gradient_P)))
        elif len(gradient_P):
            self._data.add_up(gradient_P)

    def counted(self, row_P: Tensor, layout: RowLayout) -> Tensor:
        if layout.cut is None or not layout.cut.uncounted:
            return row_P
        counted = _others(layout.cut.uncounted, len(row_P))
        return torch.cat([row_P[:0], *(row_P[each.start : each.stop] for each in counted)])


def _joined(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return ranges in order, with neighbours as one."""
    joined: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return tuple(joined)


def _others(ranges: Sequence[range], length: int) -> list[range]:
    """Return the ranges between some ranges, which are in order, from 0 to ``length``."""
    starts, stops = [0, *(each.stop for each in ranges)], [*(each.start for each in ranges), length]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
