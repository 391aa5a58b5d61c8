"""The adapters of many tenants on the experts of one layer, bound to the rows of a batch.

An expert computes ``down(activation(gate(x), up(x)))``; gate and up are one product. A :class:`Part` is an adapter's A
and B on one of these projections. Where all experts share A, x A.T is computed once for each row; where they share B,
the experts' h are weighted and added up first, so that B is applied once for each row. Otherwise there is one for each
expert, and it is applied to the pairs of that expert and the adapter's request.

Shapes: T rows, S pairs, E experts, G groups, R rank of a stack, I input and O output features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.model.decoder.experts.routes import PairRange, Routes
from twinkle.model.decoder.lora.grouped import add_grouped_outer, grouped_mm
from twinkle.model.decoder.lora.segments import Segment, SegmentLora
from twinkle.model.decoder.products import add_outer_products, add_product


@dataclass(frozen=True)
class Part:
    """One projection's adapters for the groups of one segment, and the fp32 tensors that collect their gradients.

    ``outputs``: the columns of the base product that it adds to. Of the first dimension of experts, A or B may have 1.
    """

    segment: Segment
    outputs: slice
    a_GERI: Tensor
    b_GEOR: Tensor
    da_GERI: Tensor | None
    db_GEOR: Tensor | None

    @property
    def rank(self) -> int:
        return self.a_GERI.shape[2]

    @property
    def shares_a(self) -> bool:
        return self.a_GERI.shape[1] == 1

    @property
    def shares_b(self) -> bool:
        return self.b_GEOR.shape[1] == 1


def bind(segments: Sequence[SegmentLora], module: str) -> tuple[list[Part], list[Part]]:
    """Return the adapters on the experts of a module, as views: those on gate and up, and those on down."""
    up, down = [], []
    for segment in segments:
        layout = segment.layout
        for number, name in enumerate((f"{module}.w1", f"{module}.w3")):
            if layout.has(name):
                target = layout.target(name)
                width = target.out_features
                side_by_side = slice(number * width, (number + 1) * width)
                up.append(_part(segment, name, slice(number, None, 2) if target.alternates else side_by_side))
        if layout.has(f"{module}.gate_up_proj"):
            up.append(_part(segment, f"{module}.gate_up_proj", slice(None)))
        down += [
            _part(segment, name, slice(None)) for name in (f"{module}.w2", f"{module}.down_proj") if layout.has(name)
        ]
    return up, down


def _part(segment: SegmentLora, name: str, outputs: slice) -> Part:
    weights = segment.layout.views(segment.weights_GP, name)
    if segment.gradient_GP is None:
        return Part(segment.segment, outputs, *weights, None, None)
    return Part(segment.segment, outputs, *weights, *segment.layout.views(segment.gradient_GP, name))


@dataclass(frozen=True)
class PartOnPairs:
    """A part, and the pairs of its groups in one batch of routes."""

    part: Part
    ranges: Sequence[PairRange]  # ``group`` is that within the part's segment

    # --- x A.T --------------------------------------------------------------------------------------------------------

    def inner_of_rows(self, x_TI: Tensor) -> Tensor:
        """Return x A.T (T, R) where all experts share A; 0 in rows of other segments."""
        part = self.part
        h_TR = x_TI.new_zeros(len(x_TI), part.rank)
        rows, groups = part.segment.select_rows, part.segment.groups
        grouped_mm(rows(h_TR), rows(x_TI), part.a_GERI[:, 0].transpose(1, 2), groups, beta=0)
        return h_TR

    def inner_of_pairs(self, x_SI: Tensor) -> Tensor:
        """Return x A.T (S, R) where each expert has an A; 0 for pairs of other segments."""
        h_SR = x_SI.new_zeros(len(x_SI), self.part.rank)
        for each in self.ranges:
            pairs = slice(each.start, each.stop)
            add_product(h_SR[pairs], x_SI[pairs], self.part.a_GERI[each.group, each.expert].t(), beta=0)
        return h_SR

    # --- h B.T --------------------------------------------------------------------------------------------------------

    def add_to_pairs(self, y_SO: Tensor, h_SR: Tensor) -> None:
        """Compute y += h B.T where each expert has a B."""
        y_SO = y_SO[:, self.part.outputs]
        for each in self.ranges:
            pairs = slice(each.start, each.stop)
            y_SO[pairs] += _product(h_SR[pairs], self.part.b_GEOR[each.group, each.expert].t())

    def add_to_rows(self, y_TO: Tensor, h_TR: Tensor) -> None:
        """Compute y += h B.T where all experts share B."""
        part = self.part
        rows, groups = part.segment.select_rows, part.segment.groups
        grouped_mm(rows(y_TO), rows(h_TR), part.b_GEOR[:, 0].transpose(1, 2), groups, beta=1)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def outer_gradient_of_pairs(self, dy_SO: Tensor, h_SR: Tensor) -> Tensor:
        """Add dy.T h to the gradient of each expert's B, and return the gradient of h (S, R)."""
        part, dy_SO = self.part, dy_SO[:, self.part.outputs]
        assert part.db_GEOR is not None, "the batch was built without room for gradients"
        dh_SR = torch.zeros_like(h_SR)
        for each in self.ranges:
            pairs, dy = slice(each.start, each.stop), dy_SO[each.start : each.stop].contiguous()
            add_product(dh_SR[pairs], dy, part.b_GEOR[each.group, each.expert], beta=0)
            add_outer_products(part.db_GEOR[each.group, each.expert], dy, h_SR[pairs])
        return dh_SR

    def outer_gradient_of_rows(self, dy_TO: Tensor, h_TR: Tensor) -> Tensor:
        """Add dy.T h to the gradient of the B that all experts share, and return the gradient of h (T, R)."""
        part = self.part
        assert part.db_GEOR is not None, "the batch was built without room for gradients"
        rows, groups = part.segment.select_rows, part.segment.groups
        dh_TR = torch.zeros_like(h_TR)
        grouped_mm(rows(dh_TR), rows(dy_TO), part.b_GEOR[:, 0], groups, beta=0)
        add_grouped_outer(part.db_GEOR[:, 0], rows(dy_TO), rows(h_TR), groups)
        return dh_TR

    def inner_gradient_of_pairs(self, dh_SR: Tensor, x_SI: Tensor, dx_SI: Tensor) -> None:
        """Add dh.T x to the gradient of each expert's A, and dh A to that of x, in place."""
        part = self.part
        assert part.da_GERI is not None, "the batch was built without room for gradients"
        for each in self.ranges:
            pairs = slice(each.start, each.stop)
            add_product(dx_SI[pairs], dh_SR[pairs], part.a_GERI[each.group, each.expert])
            add_outer_products(part.da_GERI[each.group, each.expert], dh_SR[pairs], x_SI[pairs])

    def inner_gradient_of_rows(self, dh_TR: Tensor, x_TI: Tensor, dx_TI: Tensor) -> None:
        """Add dh.T x to the gradient of the A that all experts share, and dh A to that of x, in place."""
        part = self.part
        assert part.da_GERI is not None, "the batch was built without room for gradients"
        rows, groups = part.segment.select_rows, part.segment.groups
        grouped_mm(rows(dx_TI), rows(dh_TR), part.a_GERI[:, 0], groups, beta=1)
        add_grouped_outer(part.da_GERI[:, 0], rows(dh_TR), rows(x_TI), groups)


def on_pairs(parts: Sequence[Part], routes: Routes, rows: int) -> list[PartOnPairs]:
    """Return the parts with the pairs of each; parts of one segment share them."""
    by_segment: dict[int, list[PairRange]] = {}
    for part in parts:
        segment = part.segment
        if segment.start not in by_segment:
            sizes = torch.tensor(segment.groups.sizes)
            group_T = torch.full((rows,), -1)
            group_T[segment.start : segment.stop] = torch.arange(len(sizes)).repeat_interleave(sizes)
            by_segment[segment.start] = routes.ranges(group_T.to(routes.row_S.device), len(sizes))
    return [PartOnPairs(part, by_segment[part.segment.start]) for part in parts]


def _product(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    return add_product(left_NK.new_empty(len(left_NK), right_KM.shape[1]), left_NK, right_KM, beta=0)
