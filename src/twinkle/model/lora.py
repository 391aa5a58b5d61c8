"""A frozen linear layer with the LoRA of many tenants on top.

The rows of a batch are ordered so that the rows of one stack (adapters of one rank bucket and one set of target
modules) are a contiguous :class:`Segment`, and inside it the rows of one request are a group. A layer is given, for the
time of one call, the adapters of the batch (:class:`LayerLora`) and computes

    y = x W.T + bias;   y[segment] += grouped(x[segment], A) B

B carries the adapter's scaling (alpha / rank) already. Autograd knows of x and y alone: the backward pass adds the
gradients of A and B to fp32 rows, one row a group. Requests never mix, not even two requests of the same adapter.

Shapes: T rows, I input and O output features, G groups, R rank of a stack (of h: the largest of the batch), P
parameters of an adapter's row.
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinkle.model.grouped import Groups, add_grouped_outer, grouped_mm
from twinkle.model.stacks import RowLayout


@dataclass(frozen=True)
class Segment:
    """A contiguous range of rows whose adapters live in the same stack."""

    start: int
    stop: int
    groups: Groups

    def of(self, rows: Tensor) -> Tensor:
        return rows[self.start : self.stop]


@dataclass(frozen=True)
class BoundLora:
    """A linear layer's adapters for the groups of one segment, and where their gradients are added up (fp32)."""

    segment: Segment
    a_GRI: Tensor
    b_GOR: Tensor
    da_GRI: Tensor | None = None  # None when nothing is trained
    db_GOR: Tensor | None = None


@dataclass(frozen=True)
class SegmentLora:
    """The adapters of consecutive requests that share a stack, and their gradients."""

    segment: Segment
    layout: RowLayout
    weights_GP: Tensor
    gradient_GP: Tensor | None  # fp32; None when nothing is trained

    def bound(self, name: str) -> BoundLora:
        weights = self.layout.views(self.weights_GP, name)
        if self.gradient_GP is None:
            return BoundLora(self.segment, *weights)
        return BoundLora(self.segment, *weights, *self.layout.views(self.gradient_GP, name))


class LayerLora:
    """The adapters of one decoder layer in one batch.

    ``key`` stands for this object where only tensors can go: through compiled code.
    """

    def __init__(self, prefix: str, segments: Sequence[SegmentLora]) -> None:
        self.width = max(segment.layout.rank for segment in segments)
        self.key = torch.tensor(next(_KEYS))
        self._prefix = prefix  # of the names of its linear layers
        self._segments = segments
        self._bound: dict[str, tuple[BoundLora, ...]] = {}
        _BY_KEY[int(self.key)] = self

    def bound(self, name: str) -> tuple[BoundLora, ...]:
        """One entry a segment with adapters on this linear layer; made when it first runs, while the device is busy."""
        if name not in self._bound:
            full = self._prefix + name
            self._bound[name] = tuple(segment.bound(full) for segment in self._segments if segment.layout.has(full))
        return self._bound[name]


_KEYS = itertools.count()
_BY_KEY: weakref.WeakValueDictionary[int, LayerLora] = weakref.WeakValueDictionary()


class LoraLinear(nn.Module):
    """Takes the place of an ``nn.Linear``, named within its decoder layer; without adapters it is that layer."""

    def __init__(self, base: nn.Linear, name: str) -> None:
        super().__init__()
        self.weight_OI = base.weight
        self.bias_O = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.name = name
        self.lora: LayerLora | None = None

    @property
    def weight(self) -> Tensor:  # model code reads these of its linear layers
        return self.weight_OI

    @property
    def bias(self) -> Tensor | None:
        return self.bias_O

    def forward(self, x: Tensor) -> Tensor:
        lora = self.lora
        if lora is None:
            return F.linear(x, self.weight_OI, self.bias_O)
        x_TI = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():
            y_TO, _ = _compiled_forward(x_TI, self.weight_OI, self.bias_O, lora.key, self.name, lora.width)
        elif bound := lora.bound(self.name):
            y_TO = _LoraLinear.apply(x_TI, self.weight_OI, self.bias_O, bound, lora.width)
        else:
            return F.linear(x, self.weight_OI, self.bias_O)
        return y_TO.view(*x.shape[:-1], self.out_features)


def add_lora(lora: BoundLora, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor, *, beta: int = 1) -> None:
    """h = x A.T and y = beta · y + h B.T, in place, in the rows of the segment."""
    segment, groups = lora.segment, lora.segment.groups
    h = segment.of(h_TR)[:, : lora.a_GRI.shape[1]]
    grouped_mm(h, segment.of(x_TI), lora.a_GRI.transpose(1, 2), groups, beta=0)
    grouped_mm(segment.of(y_TO), h, lora.b_GOR.transpose(1, 2), groups, beta=beta)


def add_lora_gradient(lora: BoundLora, dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, dx_TI: Tensor) -> None:
    """Adds what comes of dy in the rows of the segment to the gradients of A, B and x."""
    assert lora.da_GRI is not None and lora.db_GOR is not None, "a gradient was asked for without a place to put it"
    segment, groups = lora.segment, lora.segment.groups
    dy, h = segment.of(dy_TO), segment.of(h_TR)[:, : lora.a_GRI.shape[1]]
    dh = grouped_mm(torch.empty_like(h), dy, lora.b_GOR, groups, beta=0)
    add_grouped_outer(lora.da_GRI, dh, segment.of(x_TI), groups)
    add_grouped_outer(lora.db_GOR, dy, h, groups)
    grouped_mm(segment.of(dx_TI), dh, lora.a_GRI, groups, beta=1)


def _forward(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, bound: Sequence[BoundLora], width: int
) -> tuple[Tensor, Tensor]:
    """y, and x A.T for the backward pass: the product with B is never kept."""
    y_TO = F.linear(x_TI, weight_OI, bias_O)
    h_TR = x_TI.new_empty(x_TI.shape[0], width)
    for lora in bound:
        add_lora(lora, x_TI, h_TR, y_TO)
    return y_TO, h_TR


def _backward(dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, weight_OI: Tensor, bound: Sequence[BoundLora]) -> Tensor:
    """dx; the gradients of A and B are added to their rows."""
    dy_TO = dy_TO.contiguous()
    dx_TI = dy_TO @ weight_OI
    for lora in bound:
        add_lora_gradient(lora, dy_TO, x_TI, h_TR, dx_TI)
    return dx_TI


class _LoraLinear(torch.autograd.Function):
    """One graph node a layer."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, bound: Sequence[BoundLora], width: int
    ) -> Tensor:
        y_TO, h_TR = _forward(x_TI, weight_OI, bias_O, bound, width)
        ctx.bound = bound
        ctx.save_for_backward(x_TI, h_TR, weight_OI)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, h_TR, weight_OI = ctx.saved_tensors
        return _backward(dy_TO, x_TI, h_TR, weight_OI, ctx.bound), None, None, None, None


# The same for compiled code. To the compiler these two are single steps, so that one compiled layer serves every batch,
# whatever its adapters. Nothing is lost: it would not fuse matrix products with anything either.


@torch.library.custom_op("twinkle::lora_linear", mutates_args=())
def _compiled_forward(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, key: Tensor, name: str, width: int
) -> tuple[Tensor, Tensor]:
    return _forward(x_TI, weight_OI, bias_O, _BY_KEY[int(key)].bound(name), width)


@torch.library.custom_op("twinkle::lora_linear_backward", mutates_args=())
def _compiled_backward(dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, weight_OI: Tensor, key: Tensor, name: str) -> Tensor:
    return _backward(dy_TO, x_TI, h_TR, weight_OI, _BY_KEY[int(key)].bound(name))


@_compiled_forward.register_fake
def _(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, key: Tensor, name: str, width: int
) -> tuple[Tensor, Tensor]:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0]), x_TI.new_empty(x_TI.shape[0], width)


@_compiled_backward.register_fake
def _(dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, weight_OI: Tensor, key: Tensor, name: str) -> Tensor:
    return torch.empty_like(x_TI)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TI, weight_OI, _, key, name, _ = inputs
    ctx.name = name
    ctx.save_for_backward(x_TI, output[1], weight_OI, key)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy_TO: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x_TI, h_TR, weight_OI, key = ctx.saved_tensors
    return _compiled_backward(dy_TO, x_TI, h_TR, weight_OI, key, ctx.name), None, None, None, None, None


_compiled_forward.register_autograd(_differentiate, setup_context=_save)
