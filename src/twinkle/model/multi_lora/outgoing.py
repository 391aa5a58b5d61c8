"""The weights that a multi-LoRA model sends to a sampler: an adapter, or the base model with an adapter merged in.

Shapes: E experts, R rank, I input and O output features.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.adapters.expert_exports import for_tinker
from twinkle.model.adapters.expert_forms import has_experts, is_tinkers
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.decoder.architecture import Split
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.weights.sources import LowRank, ReadableWeight, WeightSource

__all__ = ["adapter_sources", "base_sources", "merge_adapter"]

W = TypeVar("W", bound=ReadableWeight)

_PREFIX = "base_model.model."
_GATE_UP, _DOWN = ("w1", "w3"), "w2"
_OF_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # where each expert has weights of its own
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
    spec, tensors = (
        trainer.spec(merged),
        {name: torch.from_numpy(each) for name, each in trainer.weights(merged).items()},
    )
    if has_experts(tensors):
        if any(experts.alternating for experts in trainer.architecture.experts):
            raise UnsupportedError(f"{asked}: an adapter on experts of {trainer.architecture.family}; allowed: False")
        if not is_tinkers(tensors):  # PEFT's form
            config, tensors = for_tinker(trainer.peft_config(merged), tensors)
            spec = spec_from_peft(config)
    modules = sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors})
    parts = {part.name: split for split in trainer.architecture.split for part in split.parts}
    on_experts: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    on_parts: dict[Split, dict[str, tuple[Tensor, Tensor]]] = {}
    for module, scaling in zip(modules, spec.module_scalings(modules), strict=True):
        if module == head and tied:
            raise UnsupportedError(
                f"{asked}: adapter {merged!r} trains the head {head!r}, which shares its weights with the "
                "embeddings; allowed: False"
            )
        a_RI, b_OR = (tensors[f"{_PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        if a_RI.dim() == 3:
            experts, _, projection = module.rpartition(".")
            on_experts.setdefault(experts, {})[projection] = (a_RI, b_OR * scaling)
        elif module in parts:
            on_parts.setdefault(parts[module], {})[module] = (a_RI, b_OR * scaling)
        else:
            found[f"{module}.weight"] = found[f"{module}.weight"].merged(LowRank(a_RI, b_OR, scaling))
    for experts, factors in on_experts.items():
        _merge_experts(found, experts, factors, asked)
    for split, factors in on_parts.items():
        weight = f"{split.whole.name}.weight"
        found[weight] = found[weight].merged(_joint(split, factors))
    return found


def _joint(split: Split, factors: Mapping[str, tuple[Tensor, Tensor]]) -> LowRank:
    """Return one adapter of a linear layer from the A and B of its projections; some of these may have none."""
    b_OR = torch.zeros(split.whole.out_features, sum(len(a_RI) for a_RI, _ in factors.values()))
    rows, column = dict(zip(split.parts, b_OR.split([part.out_features for part in split.parts]), strict=True)), 0
    inner = []
    for part, place_oR in rows.items():
        if part.name in factors:
            a_RI, own_oR = factors[part.name]
            place_oR[:, column : column + len(a_RI)] = own_oR
            column += len(a_RI)
            inner.append(a_RI)
    return LowRank(torch.cat(inner), b_OR, 1.0)


def _merge_experts(found: dict[str, W], experts: str, factors: Mapping[str, tuple[Tensor, Tensor]], asked: str) -> None:
    """Merge an adapter's A and B, with its scaling in B, into the weights of a layer's experts, in place."""
    count = max(len(factor) for pair in factors.values() for factor in pair)
    whole = {name: LowRank(a.expand(count, -1, -1), b.expand(count, -1, -1), 1.0) for name, (a, b) in factors.items()}
    if f"{experts}.0.gate_proj.weight" in found:
        for expert in range(count):
            for name, lora in whole.items():
                weight = f"{experts}.{expert}.{_OF_EXPERT[name]}.weight"
                found[weight] = found[weight].merged(LowRank(lora.a_RI[expert], lora.b_OR[expert], 1.0))
        return
    merged = {f"{experts}.down_proj": whole[_DOWN]} if _DOWN in whole else {}
    if not whole.keys().isdisjoint(_GATE_UP):
        merged[f"{experts}.gate_up_proj"] = _side_by_side([whole.get(name) for name in _GATE_UP])
    for name, lora in merged.items():
        shape = (count, lora.b_OR.shape[1], lora.a_RI.shape[2])
        if name not in found or found[name].meta(name).shape != shape:
            raise UnsupportedError(f"{asked}: an adapter on experts whose weights are not {shape}, like {name}")
        found[name] = found[name].merged(lora)


def _side_by_side(halves: Sequence[LowRank | None]) -> LowRank:
    """Return one adapter of gate and up, whose outputs are side by side; one of both may have none."""
    present = [half for half in halves if half is not None]
    (count, width, _), ranks = present[0].b_OR.shape, [half.b_OR.shape[2] for half in present]
    b_EOR = torch.zeros(count, len(halves) * width, sum(ranks))
    columns = iter(b_EOR.split(ranks, 2))
    for number, half in enumerate(halves):
        if half is not None:
            next(columns)[:, number * width : (number + 1) * width] = half.b_OR
    return LowRank(torch.cat([half.a_RI for half in present], 1), b_EOR, 1.0)
