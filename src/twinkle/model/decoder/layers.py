"""The decoder of a Hugging Face model, made to serve many adapters at once.

Each linear layer that adapters may target becomes a :class:`LoraLinear`; each decoder layer is wrapped so that the
batch it computes arrives as an argument of its forward call. Recomputation in the backward pass therefore sees the
batch it belongs to, whatever ran in between.
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
from twinkle.model.decoder.lora.lora import LayerAdapters, LayerLora, LoraLinear
from twinkle.model.decoder.lora.segments import SegmentLora
from twinkle.model.decoder.lora.table import table_for

GiveWay = Callable[[], None]  # others may use the model before it returns, with batches of their own


@dataclass(frozen=True)
class LayerBatch:
    """What a decoder layer needs to know of the batch beside its hidden states."""

    packing: Packing | None  # None: the batch is padded and masked instead
    lora: tuple[LayerAdapters, ...]  # one entry a decoder layer; to be trained they must be LayerLora
    recompute: bool
    give_way: GiveWay | None = None  # called before each layer, and on the way back after it
    cached: tuple[CachedAttention, ...] | None = None  # sampling: one entry a decoder layer, in place of packing


class TenantLayer(nn.Module):
    """Wraps decoder layer number ``index``; transformers passes ``batch=`` through to it."""

    def __init__(self, inner: nn.Module, index: int) -> None:
        super().__init__()
        self.inner = inner
        self.index = index
        self.linears = [module for module in inner.modules() if isinstance(module, LoraLinear)]
        self.compiled: Callable[..., Tensor] | None = None
        self.opens_gradient = False  # the backward pass comes here even if no adapter does

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
            # The first layer with adapters. Their gradients are made on the way of this one, so it must be asked for.
            hidden_states = hidden_states.detach().requires_grad_()
        train = train and hidden_states.requires_grad
        if batch.give_way is not None:
            hidden_states = _giving_way(hidden_states, batch.give_way, train)
        run = self.compiled if train and self.compiled is not None else _run_eagerly
        if train and batch.recompute:
            return checkpoint(run, self.inner, self.linears, lora, hidden_states, args, kwargs, use_reentrant=False)
        return run(self.inner, self.linears, lora, hidden_states, args, kwargs)

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
    """One decoder layer with these adapters, which it has forgotten afterwards. This is the unit of compilation."""
    for linear in linears:
        linear.lora = lora
    output = inner(hidden_states, *args, **kwargs)
    for linear in linears:
        linear.lora = None
    return output


def _run_eagerly(inner: nn.Module, linears: Sequence[LoraLinear], *rest: Any) -> Tensor:
    """The same; recomputation leaves the layer by an exception as soon as it has what it needs."""
    try:
        return run_layer(inner, linears, *rest)
    finally:
        for linear in linears:
            linear.lora = None


def _giving_way(hidden_states: Tensor, give_way: GiveWay, train: bool) -> Tensor:
    """Return hidden_states. Calls give_way now, and once more when the backward pass is here."""
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
    """Put LoRA layers and layer wrappers in place; the model's own weights stay where they are."""
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
    """The adapters of a batch for each decoder layer. Rows outside all segments get none."""
    table = table_for(segments, [target.name for target in architecture.linear])
    prefixes = [f"{architecture.layers_path}.{index}." for index in range(architecture.layer_count)]
    return tuple(LayerLora(prefix, segments, table) for prefix in prefixes)
