"""The rows of a batch by stack and request, and LoRA on them.

The rows of a batch are ordered so that the rows of one stack (adapters of one rank bucket and one set of target
modules) are a contiguous :class:`Segment`, and within it the rows of one request are a group. Requests with dropout
have segments of their own. B already includes the adapter's scaling (alpha / rank). Gradients are added to fp32 rows,
one row per group, so the gradients of two requests stay separate even if both are of the same adapter.

Shapes: T rows, I input and O output features, G groups, R rank of a stack (for h: the largest rank of the batch), P
parameters of an adapter's row.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinkle.model.decoder.lora.dropout import RowDropout
from twinkle.model.decoder.lora.grouped import Groups, add_grouped_outer, grouped_mm
from twinkle.model.decoder.lora.stacks import RowLayout


@dataclass(frozen=True)
class Segment:
    """A contiguous range of rows whose adapters are in the same stack."""

    start: int
    stop: int
    groups: Groups

    def select_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of this segment from the rows of the batch."""
        return rows[self.start : self.stop]


@dataclass(frozen=True)
class BoundLora:
    """A linear layer's adapters for the groups of one segment, and the fp32 tensors that collect their gradients."""

    segment: Segment
    a_GRI: Tensor
    b_GOR: Tensor
    da_GRI: Tensor | None = None  # None when nothing is trained
    db_GOR: Tensor | None = None
    module: str = ""  # the layer's name in the base model, needed for dropout
    first_input: int = 0  # the number of x's first feature in the whole layer, needed for dropout
    dropout: RowDropout | None = None  # that of the segment's rows


@dataclass(frozen=True)
class SegmentLora:
    """The adapters of consecutive requests that share a stack, and their gradients."""

    segment: Segment
    layout: RowLayout
    weights_GP: Tensor
    gradient_GP: Tensor | None  # fp32; None when nothing is trained
    dropout: RowDropout | None = None  # that of the segment's rows

    def bound(self, name: str) -> BoundLora:
        """Return the adapters of one linear layer, as views."""
        bound = BoundLora(
            self.segment,
            *self.layout.views(self.weights_GP, name),
            module=name,
            first_input=self.layout.first_input(name),
            dropout=self.dropout,
        )
        if self.gradient_GP is None:
            return bound
        da_GRI, db_GOR = self.layout.views(self.gradient_GP, name)
        return replace(bound, da_GRI=da_GRI, db_GOR=db_GOR)


def add_lora(lora: BoundLora, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor, *, beta: int = 1) -> None:
    """Compute h = x A.T and y = beta · y + h B.T, in place, in the rows of the segment. x is subject to dropout."""
    segment, groups = lora.segment, lora.segment.groups
    h = segment.select_rows(h_TR)[:, : lora.a_GRI.shape[1]]
    grouped_mm(h, _input(lora, x_TI), lora.a_GRI.transpose(1, 2), groups, beta=0)
    grouped_mm(segment.select_rows(y_TO), h, lora.b_GOR.transpose(1, 2), groups, beta=beta)


def add_lora_gradient(
    lora: BoundLora, dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, dx_TI: Tensor, *, beta: int = 1
) -> None:
    """Add to the gradients of A and B, and compute dx = beta · dx + dy B A, in place, in the rows of the segment.

    Where x is subject to dropout, so is dy B A.
    """
    assert lora.da_GRI is not None and lora.db_GOR is not None, "the batch was built without room for gradients"
    segment, groups = lora.segment, lora.segment.groups
    dy, h = segment.select_rows(dy_TO), segment.select_rows(h_TR)[:, : lora.a_GRI.shape[1]]
    dh = grouped_mm(torch.empty_like(h), dy, lora.b_GOR, groups, beta=0)
    add_grouped_outer(lora.da_GRI, dh, _input(lora, x_TI), groups)
    add_grouped_outer(lora.db_GOR, dy, h, groups)
    dx = segment.select_rows(dx_TI)
    if lora.dropout is None:
        grouped_mm(dx, dh, lora.a_GRI, groups, beta=beta)
        return
    of_adapter = grouped_mm(torch.empty_like(dx), dh, lora.a_GRI, groups, beta=0)
    if beta:
        lora.dropout.add(dx, of_adapter, lora.module, lora.first_input)
    else:
        dx.copy_(lora.dropout.apply(of_adapter, lora.module, lora.first_input))


def _input(lora: BoundLora, x_TI: Tensor) -> Tensor:
    """Return the adapters' input in the rows of the segment."""
    x = lora.segment.select_rows(x_TI)
    return x if lora.dropout is None else lora.dropout.apply(x, lora.module, lora.first_input)
