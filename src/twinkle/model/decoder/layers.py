"""Modifies the decoder of a Hugging Face model so that one batch can use many adapters.

Each linear layer that adapters may target, except the head, becomes a :class:`LoraLinear`; each decoder layer is
wrapped so that it gets its batch as an argument of its forward call. When the backward pass recomputes a layer it
therefore uses the right batch, even if other batches ran in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.attention import CachedAttention, Packing
from twinkle.model.decoder.image_rows import ImageRows
from twinkle.model.decoder.lora.lora import LayerAdapters, LayerLora, LoraLinear
from twinkle.model.decoder.lora.segments import SegmentLora
from twinkle.model.decoder.lora.table import table_for

GiveWay = Callable[[], None]  # called in the middle of a pass; before it returns, the model may run other batches


@dataclass(frozen=True)
class LayerBatch:
    """What a decoder layer needs to know about the batch, beside its hidden states."""

    packing: Packing | None  # None: the batch is padded and has a mask instead
    lora: tuple[LayerAdapters, ...]  # one entry per decoder layer; training needs LayerLora
    recompute: bool
    give_way: GiveWay | None = None  # called before each layer, and in the backward pass after each layer
    cached: tuple[CachedAttention, ...] | None = None  # for sampling: one entry per decoder layer, instead of packing
    images: ImageRows | None = None


class TenantLayer(nn.Module):
    """Wraps decoder layer number ``index``; transformers passes ``batch=`` through to it."""

    def __init__(self, inner: nn.Module, index: int) -> None:
        super().__init__()
        self.inner = inner
        self.index = index
        self.linears = [module for module in inner.modules() if isinstance(module, LoraLinear)]
        self.compiled: Callable[..., Tensor] | None = None
        self.opens_gradient = False  # True: the backward pass goes back to this layer even without adapters on it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some families read attributes of their layers, such as attention_type
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: Tensor, *args: object, batch: LayerBatch, **kwargs: object) -> Tensor:
        if batch.packing is not None:
            kwargs["packing"] = batch.packing
        if batch.cached is not None:
            kwargs["cached"] = batch.cached[self.index]
        lora = batch.lora[self.index]
        train = torch.is_grad_enabled()
        if train and not hidden_states.requires_grad and self._asks_for_gradient(lora):
            # The first layer with adapters. Their gradients are a side effect of computing this layer's input gradient,
            # so autograd must be made to compute that.
            hidden_states = hidden_states.detach().requires_grad_()
        train = train and hidden_states.requires_grad
        if batch.give_way is not None:
            hidden_states = _giving_way(hidden_states, batch.give_way, train)
        run = self.compiled if train and self.compiled is not None else _run_eagerly
        if train and batch.recompute:
            output: Tensor = checkpoint(
                run, self.inner, self.linears, lora, hidden_states, args, kwargs, use_reentrant=False
            )
        else:
            output = run(self.inner, self.linears, lora, hidden_states, args, kwargs)
        return output if batch.images is None else batch.images.add(output, self.index)

    def _asks_for_gradient(self, lora: LayerAdapters) -> bool:
        return self.opens_gradient or any(lora.has(linear.name) for linear in self.linears)


def run_layer(
    inner: nn.Module,
    linears: Sequence[LoraLinear],
    lora: LayerAdapters,
    hidden_states: Tensor,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Tensor:
    """Run one decoder layer with these adapters, and detach them afterwards. This function is what gets compiled."""
    for linear in linears:
        linear.lora = lora
    output = inner(hidden_states, *args, **kwargs)
    for linear in linears:
        linear.lora = None
    return output


def _run_eagerly(inner: nn.Module, linears: Sequence[LoraLinear], *rest: Any) -> Tensor:
    """Run :func:`run_layer` without compilation, and detach the adapters also after an exception.

    When torch recomputes activations, it leaves the layer by an exception as soon as it has all it needs.
    """
    try:
        return run_layer(inner, linears, *rest)
    finally:
        for linear in linears:
            linear.lora = None


def _giving_way(hidden_states: Tensor, give_way: GiveWay, train: bool) -> Tensor:
    """Call ``give_way`` now and, in training, again when the backward pass reaches this point. Return hidden_states."""
    give_way()
    given: Tensor = _GiveWay.apply(hidden_states, give_way) if train else hidden_states
    return given


class _GiveWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, give_way: GiveWay) -> Tensor:
        ctx.give_way = give_way
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.give_way()
        return gradient, None


def install(model: PreTrainedModel, architecture: Architecture) -> list[TenantLayer]:
    """Replace linear layers by LoRA layers and wrap the decoder layers. The model's weights are not copied."""
    for target in architecture.linear:
        parent_name, _, child = target.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        _, _, short_name = target.name.removeprefix(architecture.layers_path + ".").partition(".")
        setattr(parent, child, LoraLinear(model.get_submodule(target.name), short_name))
    layers = model.get_submodule(architecture.layers_path)
    for index, inner in enumerate(layers):
        layers[index] = TenantLayer(inner, index)
    return list(layers)


def bind_layers(segments: Sequence[SegmentLora], architecture: Architecture) -> tuple[LayerLora, ...]:
    """Return the adapters of a batch for each decoder layer. Rows outside all segments have none."""
    plain = [segment for segment in segments if segment.dropout is None]
    table = table_for(plain, [target.name for target in architecture.linear])
    prefixes = [f"{architecture.layers_path}.{index}." for index in range(architecture.layer_count)]
    return tuple(LayerLora(prefix, segments, table) for prefix in prefixes)
