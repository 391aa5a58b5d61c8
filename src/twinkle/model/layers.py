"""The decoder of a Hugging Face model, made to serve many adapters at once.

Each linear layer that adapters may target becomes a :class:`LoraLinear`; each decoder layer is wrapped so that the
batch it computes arrives as an argument of its forward call. Recomputation in the backward pass therefore sees the
batch it belongs to, whatever ran in between.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from twinkle.model.architecture import Architecture
from twinkle.model.attention import CachedAttention, Packing
from twinkle.model.lora import BoundLora, LoraLinear

BoundLayer = Mapping[str, tuple[BoundLora, ...]]  # linear layer, named within its decoder layer → its adapters


@dataclass(frozen=True)
class LayerBatch:
    """What a decoder layer needs to know of the batch beside its hidden states."""

    packing: Packing | None  # None: the batch is padded and masked instead
    one_stack: bool  # all rows belong to adapters of one layout
    lora: tuple[BoundLayer, ...]  # one entry a decoder layer
    recompute: bool
    cached: tuple[CachedAttention, ...] | None = None  # sampling: one entry a decoder layer, in place of packing


class TenantLayer(nn.Module):
    """Wraps decoder layer number ``index``; transformers passes ``batch=`` through to it."""

    def __init__(self, inner: nn.Module, index: int) -> None:
        super().__init__()
        self.inner = inner
        self.index = index
        self.linears = {name: module for name, module in inner.named_modules() if isinstance(module, LoraLinear)}
        self.compiled: Callable[..., Tensor] | None = None

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
        run: Callable[..., Tensor] = _run_eagerly
        if self.compiled is not None and batch.one_stack and torch.is_grad_enabled():
            run = self.compiled
            if not hidden_states.requires_grad:  # the first layer: the same code as for the others, not a second one
                hidden_states = hidden_states.detach().requires_grad_()
        if batch.recompute and torch.is_grad_enabled():
            return checkpoint(run, self.inner, self.linears, lora, hidden_states, args, kwargs, use_reentrant=False)
        return run(self.inner, self.linears, lora, hidden_states, args, kwargs)


def run_layer(
    inner: nn.Module,
    linears: Mapping[str, LoraLinear],
    lora: BoundLayer,
    hidden_states: Tensor,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Tensor:
    """One decoder layer with these adapters; nothing stays bound afterwards. This is the unit of compilation."""
    for name, linear in linears.items():
        linear.bound = lora.get(name, ())
    output = inner(hidden_states, *args, **kwargs)
    for linear in linears.values():
        linear.bound = ()
    return output


def _run_eagerly(inner: nn.Module, linears: Mapping[str, LoraLinear], *rest: Any) -> Tensor:
    """The same; recomputation leaves the layer by an exception as soon as it has what it needs."""
    try:
        return run_layer(inner, linears, *rest)
    finally:
        for linear in linears.values():
            linear.bound = ()


def install(model: PreTrainedModel, architecture: Architecture) -> list[TenantLayer]:
    """Put LoRA layers and layer wrappers in place; the model's own weights stay where they are."""
    for target in architecture.linear:
        parent_name, _, child = target.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        setattr(parent, child, LoraLinear(model.get_submodule(target.name)))
    layers = model.get_submodule(architecture.layers_path)
    for index, inner in enumerate(layers):
        layers[index] = TenantLayer(inner, index)
    return list(layers)


def split_name(name: str, architecture: Architecture) -> tuple[int, str]:
    """ "model.layers.3.mlp.up_proj" → (3, "mlp.up_proj")."""
    index, _, rest = name.removeprefix(architecture.layers_path + ".").partition(".")
    return int(index), rest
