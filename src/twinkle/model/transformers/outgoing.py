"""The weights that a plain model sends to a sampler: all of them, an adapter, or all with an adapter merged in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from twinkle.errors import UnsupportedError
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.transformers.peft_adapters import PeftAdapters
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.offer import LiveWeights, WeightsOffer
from twinkle.model.weights.sources import LowRank, WeightSource, metas, read_bucket

__all__ = ["OutgoingWeights"]


class OutgoingWeights:
    """Offers and reads the weights of a model, and counts how often they change.

    ``owner``: the object that a sampler compares with the model that it was made for.
    """

    def __init__(self, model: PreTrainedModel, adapters: PeftAdapters, owner: object) -> None:
        self._model = model
        self._adapters = adapters
        self._owner = owner
        self._id = uuid4().hex
        self._changes = 0  # how often training or loading has changed weights other than those of adapters

    def changed(self, group: OptimizerGroup) -> None:
        """Count a change of the weights of a group, unless they are those of an adapter alone."""
        config = group.adapter_config
        if config is None or config.get("bias", "none") != "none":
            self._changes += 1

    def offer(self, adapter_name: str, *, merge: bool) -> WeightsOffer:
        if merge and adapter_name:
            sources = _base_sources(self._model, adapter_name, merged=True)
            return WeightsOffer(adapter_name, True, metas(sources), None, live=self._live(sources))
        base = self.offer_base(trained=not adapter_name)
        if not adapter_name:
            return base
        adapter, config = metas(_adapter_sources(self._adapters, adapter_name)), self._adapters.config(adapter_name)
        return replace(base, adapter_name=adapter_name, adapter=adapter, peft_config=config)

    def offer_base(self, *, trained: bool) -> WeightsOffer:
        """Offer the model without adapters. ``trained``: whether it is trained itself."""
        sources = _base_sources(self._model, "", merged=False)
        base_id = None if trained else f"{self._id} {self._changes}"
        return WeightsOffer("", False, metas(sources), base_id, live=self._live(sources))

    def _live(self, sources: Mapping[str, WeightSource]) -> LiveWeights:
        shared = {
            name: source.tensor.detach()
            for name, source in sources.items()
            if source.lora is None and not isinstance(source.tensor, DTensor)
        }
        return LiveWeights(self._owner, self._model, shared, lambda: self._changes)

    def send(self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta]) -> Bucket:
        sources = _base_sources(self._model, adapter_name, merged=merged)
        if adapter_name and not merged:
            sources |= _adapter_sources(self._adapters, adapter_name)
        return read_bucket(sources, pieces)


def _adapter_sources(adapters: PeftAdapters, name: str) -> dict[str, WeightSource]:
    """Return the weights of an adapter by PEFT's names."""
    config = adapters.config(name)
    if config.get("bias", "none") != "none":
        raise UnsupportedError(
            f"merge_and_sync: adapter {name!r} trains biases of the base model (bias={config['bias']!r}), which are "
            "not part of an adapter; allowed: True"
        )
    return {key: WeightSource(tensor) for key, tensor in adapters.state_dict(name).items()}


def _base_sources(model: PreTrainedModel, adapter_name: str, *, merged: bool) -> dict[str, WeightSource]:
    """Return the weights of the model by the names of its checkpoint, if ``merged`` with the adapter in them."""
    sources: dict[str, WeightSource] = {}
    for name, parameter in model.named_parameters():
        own_name = _name_in_checkpoint(name, model, adapter_name if merged else "")
        if own_name is not None:
            sources[own_name] = WeightSource(parameter)
    if merged and adapter_name:
        for name, module in model.named_modules():
            lora = _low_rank(name, module, adapter_name)
            if lora is not None:
                _require_own_weight(model, name, module)
                weight = f"{name}.weight"
                sources[weight] = WeightSource(sources[weight].tensor, lora)
    return sources


def _name_in_checkpoint(name: str, model: PreTrainedModel, adapter_name: str) -> str | None:
    """Return the name that a parameter has without PEFT; None if it is not part of the model with this adapter.

    ``adapter_name`` "": the model without adapters.
    """
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    for number, part in enumerate(parts):
        # PEFT keeps the original of a module that is trained whole, and one copy of it for each adapter.
        if part == "modules_to_save":
            return ".".join(parts[:number] + parts[number + 2 :]) if parts[number + 1] == adapter_name else None
        if part == "original_module":
            copies: Any = model.get_submodule(".".join(parts[:number])).modules_to_save
            return None if adapter_name in copies else ".".join(parts[:number] + parts[number + 1 :])
    return ".".join(part for part in parts if part != "base_layer")


def _low_rank(name: str, module: nn.Module, adapter_name: str) -> LowRank | None:
    """Return what the adapter adds to the weight of a module; None if the module has no adapter of this name."""
    from peft.tuners import lora

    if not isinstance(module, lora.LoraLayer) or adapter_name not in {**module.lora_A, **module.lora_embedding_A}:
        return None
    kind = type(module).__name__
    if module.use_dora.get(adapter_name) or module.lora_bias.get(adapter_name):
        raise UnsupportedError(
            f"merge_and_sync: {name} has DoRA or a bias of LoRA, which cannot be merged; allowed: False"
        )
    scaling = float(module.scaling[adapter_name])
    if type(module) is lora.Linear and not module.fan_in_fan_out:
        return LowRank(
            module.lora_A[adapter_name].weight.detach(), module.lora_B[adapter_name].weight.detach(), scaling
        )
    if type(module) is lora.Embedding:  # (R, V) and (H, R); the weight is (V, H)
        a_RV, b_HR = (each[adapter_name].detach() for each in (module.lora_embedding_A, module.lora_embedding_B))
        return LowRank(b_HR.t(), a_RV.t(), scaling)
    raise UnsupportedError(f"merge_and_sync: {name} is PEFT's {kind}, which cannot be merged; allowed: False")


def _require_own_weight(model: PreTrainedModel, name: str, module: Any) -> None:
    weight = module.get_base_layer().weight
    users = [other for other, each in model.named_modules() if each._parameters.get("weight") is weight]
    if len(users) > 1:
        raise UnsupportedError(
            f"merge_and_sync: {name} has an adapter and shares its weights ({', '.join(users)}); allowed: False"
        )
