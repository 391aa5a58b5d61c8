"""Adapters on linear attention in the form that PEFT and vLLM read.

Twinkle's own form, which is Tinker's too, has ``linear_attn.in_proj_q``, ``in_proj_k`` and ``in_proj_v``, each with an
A and a B. The base model has one linear layer for the three, ``in_proj_qkv``, and other programs know only that one. An
adapter on it equals those on the three if it has their A below one another, and a block-diagonal B.

Shapes: R rank, I input and O output features.
"""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinkle.errors import UnsupportedError
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.decoder.linear_attention.layer import JOINT, PARTS
from twinkle.model.types import LoraSpec, first_matches, name_in_decoder

Config = dict[str, object]
Tensors = dict[str, Tensor]

_FRONT = "base_model.model."
_NAME = re.compile(rf"(?P<net>.*)\.(?P<part>{'|'.join(PARTS)})\.lora_(?P<factor>[AB])\.weight")


def has_parts(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether an adapter is on query, key or value of linear attention apart."""
    return any(_NAME.fullmatch(name) for name in tensors)


def with_joint_projections(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> tuple[Config, Tensors]:
    """Return an equivalent adapter on ``in_proj_qkv``, whose rank is the sum of the ranks of its three projections.

    The arguments are the contents of adapter_config.json, and tensors by name. An adapter without LoRA on the three is
    returned as it is. Of adapters on experts, :func:`~.expert_forms.for_peft` comes first.
    """
    nets, joined = _by_net(tensors)
    if not nets:
        return dict(config), dict(tensors)
    spec = spec_from_peft({**config, "target_parameters": None})
    ranks, alphas = {}, {}
    for net, factors in nets.items():
        pairs = [(factors[part, "A"], factors[part, "B"]) for part in PARTS]
        scalings = spec.module_scalings([f"{_plain(net)}.{part}" for part in PARTS])
        name, rank = f"{net}.{JOINT}", sum(len(a_RI) for a_RI, _ in pairs)
        # Where all have the same scaling, B stays as it is.
        scaling = scalings[0] if len(set(scalings)) == 1 else 1.0
        blocks = [b_OR * (own / scaling) for (_, b_OR), own in zip(pairs, scalings, strict=True)]
        joined[f"{name}.lora_A.weight"] = torch.cat([a_RI for a_RI, _ in pairs])
        joined[f"{name}.lora_B.weight"] = torch.block_diag(*blocks)
        ranks[_plain(name)] = rank
        alphas[_plain(name)] = scaling * (math.sqrt(rank) if spec.use_rslora else rank)
    modules = sorted({_plain(name).rpartition(".lora_")[0] for name in joined})
    changed = {
        "rank_pattern": _patterns(spec.rank_pattern, ranks, modules),
        "alpha_pattern": _patterns(spec.alpha_pattern, alphas, modules),
        "target_modules": _target_modules(spec),
    }
    return {**config, **changed}, joined


def _by_net(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[tuple[str, str], Tensor]], Tensors]:
    """Return the factors of each delta net by projection and factor, and all other tensors."""
    nets: dict[str, dict[tuple[str, str], Tensor]] = {}
    others: Tensors = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            others[name] = tensor
        else:
            nets.setdefault(match["net"], {})[match["part"], match["factor"]] = tensor
    for net, factors in nets.items():
        if len(factors) != 2 * len(PARTS):
            raise UnsupportedError(f"{net}: other programs need all of {', '.join(PARTS)}")
        if any(name.startswith(f"{net}.{JOINT}.lora_") for name in others):
            raise UnsupportedError(f"{net}: got {JOINT} beside its parts {', '.join(PARTS)}, allowed: one of both")
    return nets, others


def _patterns(
    given: Mapping[str, int] | Mapping[str, float], own: Mapping[str, float], modules: Sequence[str]
) -> dict[str, float]:
    """Return patterns that give ``own`` modules their values, and all others what they had.

    Given patterns that would also fit one of the own modules become one for each of the modules that they are for.
    """
    patterns: dict[str, float] = {}
    found = first_matches({pattern: number for number, pattern in enumerate(given)}, modules, -1)
    for number, (pattern, value) in enumerate(given.items()):
        if any(each >= 0 for each in first_matches({pattern: 0}, list(own), -1)):
            mine = [name for name, each in zip(modules, found, strict=True) if each == number and name not in own]
            patterns |= {_pattern(name): value for name in mine}
        else:
            patterns[pattern] = value
    ours = {_pattern(name): value for name, value in own.items()}
    if len(set(ours.values())) == 1:
        ours = {f"linear_attn.{JOINT}": next(iter(own.values()))}
    return {key: int(value) if float(value).is_integer() else value for key, value in (patterns | ours).items()}


def _target_modules(spec: LoraSpec) -> object:
    """Return the names of the modules, with that of the joint one in the places of its projections."""
    if spec.target_modules is None or isinstance(spec.target_modules, str):
        raise UnsupportedError(f"target_modules: got {spec.target_modules!r}, a saved adapter names its modules")
    return sorted({re.sub(rf"({'|'.join(PARTS)})$", JOINT, name) for name in spec.target_modules})


def _plain(name: str) -> str:
    return name.removeprefix(_FRONT)


def _pattern(name: str) -> str:
    return name_in_decoder(name).replace(".", r"\.")
