"""A frozen linear layer with the LoRA of many tenants on top.

The rows of a batch are ordered so that the rows of one stack (adapters of one rank bucket and one set of target
modules) are a contiguous :class:`Segment`, and inside it the rows of one request are a group. A layer is given, for the
time of one call, the A and B of each group (:class:`BoundLora`) and computes

    y = x W.T + bias;   y[segment] += grouped(x[segment], A) B

B carries the adapter's scaling (alpha / rank) already. Gradients of A and B are one matrix a group: requests never mix,
not even two requests of the same adapter.

Shapes: T rows, I input and O output features, G groups, R rank of the stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinkle.model.grouped import Groups, add_grouped_mm, grouped_mm, grouped_outer


@dataclass(frozen=True)
class Segment:
    """A contiguous range of rows whose adapters live in the same stack; ``whole`` when it is the whole batch."""

    start: int
    stop: int
    groups: Groups
    whole: bool = False


@dataclass(frozen=True)
class BoundLora:
    """The weights of one layer for the groups of one segment: a_GRI and b_GOR, leaves of the autograd graph."""

    segment: Segment
    a_GRI: Tensor
    b_GOR: Tensor


class LoraLinear(nn.Module):
    """Takes the place of an ``nn.Linear``; without bound adapters it is that layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight_OI = base.weight
        self.bias_O = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.bound: tuple[BoundLora, ...] = ()

    @property
    def weight(self) -> Tensor:  # model code reads these of its linear layers
        return self.weight_OI

    @property
    def bias(self) -> Tensor | None:
        return self.bias_O

    def forward(self, x: Tensor) -> Tensor:
        if not self.bound:
            return F.linear(x, self.weight_OI, self.bias_O)
        rows_TI = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():
            y_TO = _plain(rows_TI, self.weight_OI, self.bias_O, self.bound)
        else:
            segments = tuple(lora.segment for lora in self.bound)
            factors = [factor for lora in self.bound for factor in (lora.a_GRI, lora.b_GOR)]
            y_TO = _LoraLinear.apply(rows_TI, self.weight_OI, self.bias_O, segments, *factors)
        return y_TO.view(*x.shape[:-1], self.out_features)


def _plain(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, bound: Sequence[BoundLora]) -> Tensor:
    """The formula as it stands, for the compiler to differentiate and fuse. Rows outside all segments get no LoRA."""
    y_TO = F.linear(x_TI, weight_OI, bias_O)
    if bound[0].segment.whole:
        a_GIR, b_GRO = bound[0].a_GRI.transpose(1, 2), bound[0].b_GOR.transpose(1, 2)
        return y_TO + grouped_mm(grouped_mm(x_TI, a_GIR, bound[0].segment.groups), b_GRO, bound[0].segment.groups)
    parts, row = [], 0
    for lora in bound:
        segment, groups = lora.segment, lora.segment.groups
        h_TR = grouped_mm(x_TI[segment.start : segment.stop], lora.a_GRI.transpose(1, 2), groups)
        delta_TO = grouped_mm(h_TR, lora.b_GOR.transpose(1, 2), groups)
        parts += [y_TO[row : segment.start], y_TO[segment.start : segment.stop] + delta_TO]
        row = segment.stop
    return torch.cat([*parts, y_TO[row:]])


class _LoraLinear(torch.autograd.Function):
    """One graph node a layer: saves x and x A.T, never the product with B, and adds in place."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, segments: Sequence[Segment], *factors: Tensor
    ) -> Tensor:
        y_TO = F.linear(x_TI, weight_OI, bias_O)
        hidden = []
        for segment, a_GRI, b_GOR in _triples(segments, factors):
            h_TR = grouped_mm(x_TI[segment.start : segment.stop], a_GRI.transpose(1, 2), segment.groups)
            add_grouped_mm(y_TO[segment.start : segment.stop], h_TR, b_GOR.transpose(1, 2), segment.groups)
            hidden.append(h_TR)
        ctx.segments = segments
        ctx.save_for_backward(x_TI, weight_OI, *factors, *hidden)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, *rest = ctx.saved_tensors
        count = len(ctx.segments)
        factors, hidden = rest[: 2 * count], rest[2 * count :]
        dy_TO = dy_TO.contiguous()
        dx_TI = dy_TO @ weight_OI if ctx.needs_input_grad[0] else None
        gradients: list[Tensor] = []
        for (segment, a_GRI, b_GOR), h_TR in zip(_triples(ctx.segments, factors), hidden, strict=True):
            dy = dy_TO[segment.start : segment.stop]
            dh_TR = grouped_mm(dy, b_GOR, segment.groups)
            x = x_TI[segment.start : segment.stop]
            gradients += [grouped_outer(dh_TR, x, segment.groups), grouped_outer(dy, h_TR, segment.groups)]
            if dx_TI is not None:
                add_grouped_mm(dx_TI[segment.start : segment.stop], dh_TR, a_GRI, segment.groups)
        return dx_TI, None, None, None, *gradients


def _triples(segments: Sequence[Segment], factors: Sequence[Tensor]) -> list[tuple[Segment, Tensor, Tensor]]:
    return list(zip(segments, factors[0::2], factors[1::2], strict=True))
