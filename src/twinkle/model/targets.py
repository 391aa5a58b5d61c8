"""Which linear layers an adapter attaches to."""

import math
import re
from dataclasses import replace
from random import SystemRandom

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.architecture import Architecture
from twinkle.model.stacks import Target
from twinkle.model.types import LoraSpec

MAX_RANK = 512
_SEED_RANGE = 2**63


def check_spec(spec: LoraSpec) -> LoraSpec:
    """The same spec with its numbers checked and a seed drawn if it had none."""
    if not _is_int(spec.rank) or not 1 <= spec.rank <= MAX_RANK:
        raise InvalidInputError("rank", spec.rank, f"an integer in [1, {MAX_RANK}]")
    if not isinstance(spec.alpha, (int, float)) or not math.isfinite(spec.alpha) or spec.alpha <= 0:
        raise InvalidInputError("alpha", spec.alpha, "a finite number > 0")
    if spec.seed is None:
        return replace(spec, seed=SystemRandom().randrange(_SEED_RANGE))
    if not _is_int(spec.seed) or not -_SEED_RANGE <= spec.seed < _SEED_RANGE:
        raise InvalidInputError("seed", spec.seed, "a 64-bit integer or None")
    return spec


def select_targets(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    """The target modules in model order, the head last."""
    if spec.target_modules is None:
        return _by_switches(spec, architecture)
    if spec.target_modules == "all-linear":
        return architecture.linear
    candidates = (*architecture.linear, architecture.head)
    if isinstance(spec.target_modules, str):  # PEFT reads any other string as a pattern for whole names
        chosen = [target for target in candidates if re.fullmatch(spec.target_modules, target.name)]
    else:
        for wanted in spec.target_modules:
            if not any(_matches(target.name, wanted) for target in candidates):
                raise InvalidInputError("target_modules", wanted, f"one of {_short_names(architecture)}")
        chosen = [t for t in candidates if any(_matches(t.name, wanted) for wanted in spec.target_modules)]
    if not chosen:
        raise InvalidInputError("target_modules", spec.target_modules, f"some of {_short_names(architecture)}")
    return tuple(chosen)


def short_names(targets: tuple[Target, ...], architecture: Architecture) -> list[str]:
    """Names for adapter_config.json: last path components where they pick out exactly these targets, else whole names."""
    suffixes = sorted({target.name.rpartition(".")[2] for target in targets})
    candidates = (*architecture.linear, architecture.head)
    picked = [target for target in candidates if any(_matches(target.name, suffix) for suffix in suffixes)]
    return suffixes if set(picked) == set(targets) else sorted(target.name for target in targets)


def _by_switches(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    if spec.train_mlp and architecture.has_experts:
        raise UnsupportedError(
            f"train_mlp: {architecture.family} has mixture-of-experts layers, where LoRA is not supported yet; "
            "create the adapter with train_mlp=False"
        )
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


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def _short_names(architecture: Architecture) -> list[str]:
    return sorted({t.name.rpartition(".")[2] for t in (*architecture.linear, architecture.head)})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
