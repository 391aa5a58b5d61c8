"""Modifies the decoder of a Hugging Face model so that one batch can use many adapters.

Each linear layer that adapters may target, except the head, becomes a :class:`LoraLinear`; each decoder layer is
wrapped so that it gets its batch as an argument of its forward call. When the backward pass recomputes a layer it
therefore uses the right batch, even if other batches ran in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.attention import CachedAttention, Packing
from twinkle.model.decoder.experts.on_device import BatchGroups
from twinkle.model.decoder.experts.replay import PassRoutes, WatchedRouters, watch_routers
from twinkle.model.decoder.image_rows import ImageRows
from twinkle.model.decoder.linear_attention.layer import DeltaNet, PackedRows, StatefulRows
from twinkle.model.decoder.lora.lora import LayerAdapters, LayerLora, LoraLinear
from twinkle.model.decoder.lora.segments import SegmentLora
from twinkle.model.decoder.lora.split import SplitLoraLinear
from twinkle.model.decoder.lora.table import table_for

GiveWay = Callable[[], None]  # called in the middle of a pass; before it returns, the model may run other batches


@dataclass(frozen=True)
class LayerBatch:
    """What a decoder layer needs to know about the batch, beside its hidden states."""

    packing: Packing | None  # None: the batch is padded and has a mask instead
    lora: tuple[LayerAdapters, ...]  # one entry per decoder layer; training needs LayerLora
    recompute: bool
    give_way: GiveWay | None = None  # called before each layer, and in the backward pass after each layer
    # For sampling: one entry per decoder layer, instead of packing and rows.
    cached: tuple[CachedAttention | StatefulRows, ...] | None = None
    images: ImageRows | None = None
    routes: PassRoutes | None = None  # None: routers choose, and nothing is recorded
    rows: PackedRows | None = None  # beside packing, for layers with state along the sequence


class TenantLayer(nn.Module):
    """Wraps decoder layer number ``index``; transformers passes ``batch=`` through to it."""

    def __init__(self, inner: nn.Module, index: int) -> None:
        super().__init__()
        self.inner = inner
        self.index = index
        self.linears = [module for module in inner.modules() if isinstance(module, LoraLinear)]
        self.experts: list[Any] = [module for module in inner.modules() if hasattr(module, "adapter_name")]
        self.delta_nets = [module for module in inner.modules() if isinstance(module, DeltaNet)]
        self.adapted = [*self.linears, *self.experts, *self.delta_nets]
        self.compiled: Callable[..., Tensor] | None = None
        self.routers: WatchedRouters | None = None  # of the whole model
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
        if self.delta_nets:
            kwargs["rows"] = batch.rows if batch.cached is None else batch.cached[self.index]
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
        if batch.routes is not None and self.routers is not None:
            run = partial(_run_with_routes, self.routers, self.index, batch.routes)
        if train and batch.recompute:
            output: Tensor = checkpoint(
                run, self.inner, self.adapted, lora, hidden_states, args, kwargs, use_reentrant=False
            )
        else:
            output = run(self.inner, self.adapted, lora, hidden_states, args, kwargs)
        return output if batch.images is None else batch.images.add(output, self.index)

    def _asks_for_gradient(self, lora: LayerAdapters) -> bool:
        on_experts = any(lora.has_experts(each.adapter_name) for each in self.experts)
        names = (name for linear in self.linears for name in linear.names)
        return self.opens_gradient or on_experts or any(map(lora.has, names))


def run_layer(
    inner: nn.Module,
    adapted: Sequence[Any],
    lora: LayerAdapters,
    hidden_states: Tensor,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Tensor:
    """Run one decoder layer with these adapters, and detach them afterwards. This function is what gets compiled."""
    for module in adapted:
        module.lora = lora
        if isinstance(module, DeltaNet):
            module.rows = kwargs["rows"]  # type: ignore[assignment]  # some versions of transformers do not pass it on
    output = inner(hidden_states, *args, **kwargs)
    _detach(adapted)
    return output


def _run_eagerly(inner: nn.Module, adapted: Sequence[Any], *rest: Any) -> Tensor:
    """Run :func:`run_layer` without compilation, and detach the adapters also after an exception.

    When torch recomputes activations, it leaves the layer by an exception as soon as it has all it needs.
    """
    try:
        return run_layer(inner, adapted, *rest)
    finally:
        _detach(adapted)


def _detach(adapted: Sequence[Any]) -> None:
    for module in adapted:
        module.lora = None
        if isinstance(module, DeltaNet):
            module.rows = None


def _run_with_routes(routers: WatchedRouters, index: int, routes: PassRoutes, *rest: Any) -> Tensor:
    """Run :func:`run_layer` without compilation. Recomputed activations use these routes, too."""
    with routers.of_pass(index, routes):
        return _run_eagerly(*rest)


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
    """Replace linear layers by LoRA layers and wrap the decoder layers. The model's weights are not copied.

    The delta nets of models that run packed are replaced, too.
    """
    splits = {split.whole.name: split for split in architecture.split}
    for target in architecture.linear:
        parent_name, _, child = target.name.rpartition(".")
        parent, base = model.get_submodule(parent_name), model.get_submodule(target.name)
        if target.name in splits:
            parts = splits[target.name].parts
            names = [_short_name(part.name, architecture) for part in parts]
            sizes = [part.out_features for part in parts]
            linear: LoraLinear = SplitLoraLinear(base, _short_name(target.name, architecture), names, sizes)
        else:
            linear = LoraLinear(base, _short_name(target.name, architecture))
        setattr(parent, child, linear)
    for split in architecture.split:
        name = split.whole.name.rpartition(".")[0]
        parent_name, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child, DeltaNet(model.get_submodule(name)))
    for experts in architecture.experts:
        module = model.get_submodule(experts.name)
        module.adapter_name = _short_name(experts.name, architecture)
    layers = model.get_submodule(architecture.layers_path)
    routers = watch_routers(list(layers))
    for index, inner in enumerate(layers):
        layers[index] = TenantLayer(inner, index)
        layers[index].routers = routers
    return list(layers)


def _short_name(name: str, architecture: Architecture) -> str:
    """Return a module's name within its decoder layer."""
    return name.removeprefix(architecture.layers_path + ".").partition(".")[2]


def bind_layers(segments: Sequence[SegmentLora], architecture: Architecture) -> tuple[LayerLora, ...]:
    """Return the adapters of a batch for each decoder layer. Rows outside all segments have none."""
    plain = [segment for segment in segments if segment.dropout is None]
    table = table_for(plain, [target.name for target in architecture.projections])
    prefixes = [f"{architecture.layers_path}.{index}." for index in range(architecture.layer_count)]
    groups = BatchGroups([segment.segment for segment in segments])
    return tuple(LayerLora(prefix, segments, table, groups) for prefix in prefixes)
