"""The weights that a multi-LoRA model sends to a sampler: an adapter, or the base model with an adapter merged in."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.weights.sources import LowRank, ReadableWeight, WeightSource

__all__ = ["adapter_sources", "base_sources", "merge_adapter"]

W = TypeVar("W", bound=ReadableWeight)

_PREFIX = "base_model.model."
_SHARDED_HEAD = {"weight_VH": "weight", "bias_V": "bias"}  # names of the parameters of a head that is sharded


def adapter_sources(trainer: Trainer, adapter_name: str) -> dict[str, WeightSource]:
    """Return the weights of an adapter by PEFT's names."""
    arrays = trainer.weights(adapter_name)
    return {name: WeightSource(torch.from_numpy(array)) for name, array in arrays.items()}


def base_sources(trainer: Trainer, merged: str | None) -> dict[str, WeightSource]:
    """Return the weights of the base model by the names of its checkpoint, with the adapter ``merged`` in them."""
    tied = bool(trainer.base.config.get_text_config().tie_word_embeddings)
    head = trainer.architecture.head.name
    sources: dict[str, WeightSource] = {}
    for name, parameter in named_weights(trainer.base).items():
        module, _, own_name = name.rpartition(".")
        if module == head and tied:  # sharding has copied the embeddings for the head
            continue
        sources[f"{module}.{_SHARDED_HEAD.get(own_name, own_name)}"] = WeightSource(parameter)
    return sources if merged is None else merge_adapter(sources, trainer, merged, tied=tied)


def merge_adapter(
    sources: Mapping[str, W], trainer: Trainer, merged: str, *, tied: bool, asked: str = "merge_and_sync"
) -> dict[str, W]:
    """Return the weights of the base model with the adapter ``merged`` in them. ``asked``: the option, for errors."""
    found, head = dict(sources), trainer.architecture.head.name
    spec, arrays = trainer.spec(merged), trainer.weights(merged)
    modules = sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in arrays})
    for module, scaling in zip(modules, spec.module_scalings(modules), strict=True):
        if module == head and tied:
            raise UnsupportedError(
                f"{asked}: adapter {merged!r} trains the head {head!r}, which shares its weights with the "
                "embeddings; allowed: False"
            )
        a_RI, b_OR = (torch.from_numpy(arrays[f"{_PREFIX}{module}.lora_{part}.weight"]) for part in "AB")
        found[f"{module}.weight"] = found[f"{module}.weight"].merged(LowRank(a_RI, b_OR, scaling))
    return found
