"""A linear layer with the LoRA of many tenants on top.

Its own weights are frozen, unless the model trains all parameters (:mod:`twinkle.model.full`): then there is no LoRA.

For the time of one call, a layer holds the adapters of the batch (:class:`LayerLora`). It computes

    y = x W.T + bias + (x A.T) B.T

with the A and B of each row's request. Autograd only knows x and y: A and B are no inputs of the autograd function, and
the backward pass adds their gradients directly to the gradient rows of the batch.

Shapes: T rows, I input and O output features, R the largest rank of the batch.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from twinkle.model.decoder.experts.expert_lora import Part, bind
from twinkle.model.decoder.experts.on_device import BatchGroups, DeviceExperts, device_parts
from twinkle.model.decoder.lora.segments import BoundLora, SegmentLora, add_lora, add_lora_gradient
from twinkle.model.decoder.lora.table import LoraTable
from twinkle.model.decoder.products import linear, mm

_SMALLEST_WIDTH = 16  # Triton compiles one kernel for all widths that are multiples of 16


class LayerAdapters(Protocol):
    """The adapters of one decoder layer for the rows of one batch. Linear layers are named within their layer."""

    @property
    def width(self) -> int:
        """Return the width of x A.T: the largest rank of the batch, or more."""
        ...

    def has(self, name: str) -> bool: ...

    def has_experts(self, name: str) -> bool: ...

    def experts(self, name: str) -> tuple[list[Part], list[Part]]:
        """Return the adapters on the experts of a module: those on gate and up, and those on down."""
        ...

    def experts_on_device(self, name: str, x_TH: Tensor) -> DeviceExperts | None:
        """Return the same as tables on CUDA, for these rows; None if there are none."""
        ...

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor) -> None:
        """Compute h = x A.T and y += h B.T, in place."""
        ...


class WithoutExperts:
    """The part of :class:`LayerAdapters` that is about experts, for adapters that are on linear layers alone."""

    def has_experts(self, name: str) -> bool:
        return False

    def experts(self, name: str) -> tuple[list[Part], list[Part]]:
        return [], []

    def experts_on_device(self, name: str, x_TH: Tensor) -> DeviceExperts | None:
        return None


class LayerLora:
    """The adapters of one decoder layer in one batch, for training and scoring.

    With a ``table`` all segments but those with dropout are computed at once, the others segment by segment. ``key`` is
    a tensor that stands for this object in compiled code, through which only tensors can be passed.
    """

    def __init__(
        self,
        prefix: str,
        segments: Sequence[SegmentLora],
        table: LoraTable | None,
        groups: BatchGroups | None = None,
    ) -> None:
        """``groups``: those of the segments, if the layers of the batch share them."""
        self.width = max([_SMALLEST_WIDTH, *(segment.layout.rank for segment in segments)])
        self.key = torch.tensor(next(_KEYS))
        self._prefix = prefix  # of the full names of this decoder layer's linear layers
        self._segments = segments
        self._table = table
        self._bound: dict[str, list[BoundLora]] = {}
        self._groups = groups or BatchGroups([segment.segment for segment in segments])
        self._experts: dict[str, tuple[list[Part], list[Part]]] = {}
        self._on_device: dict[str, DeviceExperts] = {}
        _BY_KEY[int(self.key)] = self

    def has(self, name: str) -> bool:
        return any(segment.layout.has(self._prefix + name) for segment in self._segments)

    def has_experts(self, name: str) -> bool:
        return any(self.experts(name))

    def experts(self, name: str) -> tuple[list[Part], list[Part]]:
        """Return the adapters on the experts of a module: those on gate and up, and those on down."""
        if name not in self._experts:
            full = self._prefix + name
            self._experts[name] = bind(self._segments, full)
        return self._experts[name]

    def experts_on_device(self, name: str, x_TH: Tensor) -> DeviceExperts | None:
        """Return the same as tables on CUDA, for these rows; None if there are none."""
        if not self.has_experts(name):
            return None
        if name not in self._on_device:
            segments = [segment.segment for segment in self._segments]
            up, down = (device_parts(parts, segments, x_TH.device) for parts in self.experts(name))
            groups = self._groups.on_device(len(x_TH), x_TH.device)
            self._on_device[name] = DeviceExperts(groups, up, down)
        return self._on_device[name]

    def segments_on_experts(self, name: str) -> list[SegmentLora]:
        """Return the segments whose adapters are on the experts of a module, in the order of their rows."""
        return [segment for segment in self._segments if segment.layout.is_on_experts(self._prefix + name)]

    def with_segments(self, segments: Sequence[SegmentLora]) -> "LayerLora":
        """Return the adapters of the same layer for other rows, which these segments divide."""
        return LayerLora(self._prefix, segments, None)

    def covers(self, name: str, rows: int) -> bool:
        """Return whether all ``rows`` rows of the batch have an adapter on this linear layer."""
        full = self._prefix + name
        covered = (each.segment.stop - each.segment.start for each in self._segments if each.layout.has(full))
        return sum(covered) == rows

    def add(self, name: str, x_TI: Tensor, h_TR: Tensor, y_TO: Tensor, *, beta: int = 1) -> None:
        """Compute h = x A.T and y = beta · y + h B.T, in place, for the rows that have an adapter here."""
        if self._table is not None:
            self._table.add(self._prefix + name, x_TI, h_TR, y_TO, beta=beta)
        for lora in self._by_segment(name):
            add_lora(lora, x_TI, h_TR, y_TO, beta=beta)

    def add_gradient(
        self, name: str, dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, dx_TI: Tensor, *, beta: int = 1
    ) -> None:
        """Add to the gradients of A and B, and compute dx = beta · dx + dy B A, in place, for the same rows."""
        if self._table is not None:
            self._table.add_gradient(self._prefix + name, dy_TO, x_TI, h_TR, dx_TI, beta=beta)
        for lora in self._by_segment(name):
            add_lora_gradient(lora, dy_TO, x_TI, h_TR, dx_TI, beta=beta)

    def _by_segment(self, name: str) -> list[BoundLora]:
        """Return the adapters of a linear layer by segment, without the segments of the table.

        They are bound when the layer first runs, at which time the device is busy with earlier layers.
        """
        if name not in self._bound:
            full = self._prefix + name
            own = (each for each in self._segments if self._table is None or each.dropout is not None)
            self._bound[name] = [segment.bound(full) for segment in own if segment.layout.has(full)]
        return self._bound[name]


# The values are weak references, so that the layers of a batch are freed with the batch.
_KEYS = itertools.count()
_BY_KEY: weakref.WeakValueDictionary[int, LayerLora] = weakref.WeakValueDictionary()


class LoraLinear(nn.Module):
    """Replaces an ``nn.Linear``, and computes the same without adapters. ``name``: within its decoder layer."""

    def __init__(self, base: nn.Linear, name: str) -> None:
        super().__init__()
        self.weight_OI = base.weight
        self.bias_O = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.name = name
        self.lora: LayerAdapters | None = None

    @property
    def weight(self) -> Tensor:  # model code reads weight and bias of its linear layers
        return self.weight_OI

    @property
    def bias(self) -> Tensor | None:
        return self.bias_O

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of everything here that adapters may be on."""
        return (self.name,)

    def forward(self, x: Tensor) -> Tensor:
        lora = self.lora
        if lora is None or self.weight_OI.requires_grad:  # where the weights themselves are trained, there is no LoRA
            return linear(x, self.weight_OI, self.bias_O)
        x_TI = x.reshape(-1, self.in_features).contiguous()
        if torch.compiler.is_compiling():
            assert isinstance(lora, LayerLora), "only training is compiled"
            y_TO, _ = _compiled_forward(x_TI, self.weight_OI, self.bias_O, lora.key, self.name, lora.width)
        else:
            y_TO = with_adapters(x_TI, self.weight_OI, self.bias_O, lora, self.name)
        return y_TO.view(*x.shape[:-1], self.out_features)


def with_adapters(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, lora: LayerAdapters, name: str) -> Tensor:
    """Return x W.T + bias + (x A.T) B.T for frozen weights, outside of compiled code."""
    if not lora.has(name):
        return linear(x_TI, weight_OI, bias_O)
    if torch.is_grad_enabled():
        y_TO: Tensor = _LoraLinear.apply(x_TI, weight_OI, bias_O, lora, name)
    elif isinstance(lora, LayerLora):
        y_TO, _ = _forward(x_TI, weight_OI, bias_O, lora, name)
    else:  # the sampler's LayerAdapters
        y_TO = linear(x_TI, weight_OI, bias_O)
        lora.add(name, x_TI, x_TI.new_empty(len(x_TI), lora.width), y_TO)
    return y_TO


def _forward(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, lora: LayerLora, name: str
) -> tuple[Tensor, Tensor]:
    """Return y, and x A.T for the backward pass. The product with B is not kept."""
    h_TR = x_TI.new_empty(x_TI.shape[0], lora.width)
    if bias_O is None and _lora_comes_first(x_TI, lora, name):
        y_TO = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
        lora.add(name, x_TI, h_TR, y_TO, beta=0)
        return y_TO.addmm_(x_TI, weight_OI.t()), h_TR
    y_TO = linear(x_TI, weight_OI, bias_O)
    lora.add(name, x_TI, h_TR, y_TO)
    return y_TO, h_TR


def _backward(dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, weight_OI: Tensor, lora: LayerLora, name: str) -> Tensor:
    """Return dx, and add the gradients of A and B to the batch's gradient rows."""
    dy_TO = dy_TO.contiguous()
    if _lora_comes_first(x_TI, lora, name):
        dx_TI = torch.empty_like(x_TI)
        lora.add_gradient(name, dy_TO, x_TI, h_TR, dx_TI, beta=0)
        return dx_TI.addmm_(dy_TO, weight_OI)
    dx_TI = mm(dy_TO, weight_OI)
    lora.add_gradient(name, dy_TO, x_TI, h_TR, dx_TI)
    return dx_TI


def _lora_comes_first(x_TI: Tensor, lora: LayerLora, name: str) -> bool:
    """Return whether to write LoRA's product first, and then add the base layer's product to it.

    LoRA's product is bound by memory bandwidth: written it takes half as long as added to existing values. Adding the
    base layer's product costs next to nothing on CUDA, since that one is bound by arithmetic. It only works if every
    row has an adapter, since other rows would contain uninitialized memory.
    """
    return x_TI.is_cuda and lora.covers(name, len(x_TI))


class _LoraLinear(torch.autograd.Function):
    """The layer as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, lora: LayerLora, name: str) -> Tensor:
        y_TO, h_TR = _forward(x_TI, weight_OI, bias_O, lora, name)
        ctx.lora, ctx.name = lora, name
        ctx.save_for_backward(x_TI, h_TR, weight_OI)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, h_TR, weight_OI = ctx.saved_tensors
        return _backward(dy_TO, x_TI, h_TR, weight_OI, ctx.lora, ctx.name), None, None, None, None


# The same functions for compiled code. The compiler treats each as one opaque operation, so one compiled layer serves
# every batch, whatever its adapters. This loses no speed: the compiler would not fuse matrix products anyway.


@torch.library.custom_op("twinkle::lora_linear", mutates_args=())
def _compiled_forward(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, key: Tensor, name: str, width: int
) -> tuple[Tensor, Tensor]:
    return _forward(x_TI, weight_OI, bias_O, _BY_KEY[int(key)], name)


@torch.library.custom_op("twinkle::lora_linear_backward", mutates_args=())
def _compiled_backward(dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, weight_OI: Tensor, key: Tensor, name: str) -> Tensor:
    return _backward(dy_TO, x_TI, h_TR, weight_OI, _BY_KEY[int(key)], name)


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
