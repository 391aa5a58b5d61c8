"""Checks of an adapter's spec, and the choice of the linear layers that it attaches to."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import SystemRandom

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.types import LoraSpec

MAX_RANK = 512
_SEED_RANGE = 2**63


def check_spec(spec: LoraSpec) -> LoraSpec:
    """Check a spec, and return it with a seed, which is drawn at random if it had none."""
    if not _is_int(spec.rank) or not 1 <= spec.rank <= MAX_RANK:
        raise InvalidInputError("rank", spec.rank, f"an integer in [1, {MAX_RANK}]")
    if not _is_number(spec.alpha) or not 0 < spec.alpha <= sys.float_info.max:
        raise InvalidInputError("alpha", spec.alpha, "a finite number > 0")
    if not _is_names(spec.target_modules):
        raise InvalidInputError("target_modules", spec.target_modules, 'module names, "all-linear", a pattern or None')
    if spec.seed is None:
        return replace(spec, seed=SystemRandom().randrange(_SEED_RANGE))
    if not _is_int(spec.seed) or not -_SEED_RANGE <= spec.seed < _SEED_RANGE:
        raise InvalidInputError("seed", spec.seed, "a 64-bit integer or None")
    return spec


def select_targets(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    """Return the target modules of a spec in model order, the head last."""
    if spec.target_modules is None:
        return _by_switches(spec, architecture)
    if spec.target_modules == "all-linear":
        _refuse_experts("target_modules", architecture, "name the attention layers instead")
        return architecture.linear
    candidates = (*architecture.linear, architecture.head)
    if isinstance(spec.target_modules, str):  # as in PEFT, any other string is a pattern for full names
        chosen = _by_pattern(spec.target_modules, candidates)
    else:
        for wanted in spec.target_modules:
            if not any(_matches(target.name, wanted) for target in candidates):
                raise InvalidInputError("target_modules", wanted, f"one of {_short_names(architecture)}")
        chosen = [t for t in candidates if any(_matches(t.name, wanted) for wanted in spec.target_modules)]
    if not chosen:
        raise InvalidInputError("target_modules", spec.target_modules, f"some of {_short_names(architecture)}")
    return tuple(chosen)


def short_names(targets: tuple[Target, ...], architecture: Architecture) -> list[str]:
    """Return target names for adapter_config.json: last path components, or full names where those are ambiguous.

    A last component is ambiguous if PEFT would also match modules that are not targets.
    """
    suffixes = sorted({_last(target.name) for target in targets})
    names = {target.name for target in targets}
    picked = {name for name in architecture.module_names if _last(name) in suffixes}
    return suffixes if picked == names else sorted(names)


def _by_switches(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    if spec.train_mlp:
        _refuse_experts("train_mlp", architecture, "create the adapter with train_mlp=False")
    chosen: tuple[Target, ...] = ()
    if spec.train_attn:
        chosen += architecture.attention
    if spec.train_mlp:
        chosen += architecture.mlp
    if spec.train_unembed:
        chosen += (architecture.head,)
    if not chosen:
        raise InvalidInputError("train_attn, train_mlp, train_unembed", False, "at least one of them true")
    return chosen


def _refuse_experts(field: str, architecture: Architecture, advice: str) -> None:
    if architecture.has_experts:
        raise UnsupportedError(
            f"{field}: {architecture.family} has mixture-of-experts layers, where LoRA is not supported yet; {advice}"
        )


def _by_pattern(pattern: str, candidates: tuple[Target, ...]) -> list[Target]:
    try:
        return [target for target in candidates if re.fullmatch(pattern, target.name)]
    except re.error as error:
        raise InvalidInputError("target_modules", pattern, f"a regular expression ({error})") from error


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def _short_names(architecture: Architecture) -> list[str]:
    return sorted({_last(target.name) for target in (*architecture.linear, architecture.head)})


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_names(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    return isinstance(value, Sequence) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
