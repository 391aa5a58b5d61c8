"""Checks of an adapter's spec, and the choice of the linear layers that it attaches to."""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import SystemRandom

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.decoder.architecture import Architecture
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.types import INIT_WEIGHTS, LoraSpec, TrainingSpec

logger = logging.getLogger(__name__)

MAX_RANK = 512
_SEED_RANGE = 2**63


def check_spec(spec: TrainingSpec) -> LoraSpec:
    """Check a spec, and return it with a seed, which is drawn at random if it had none."""
    if not isinstance(spec, LoraSpec):
        raise UnsupportedError(f"spec: got {spec}, allowed: a LoraSpec, because this trainer trains LoRA adapters")
    if not _is_int(spec.rank) or not 1 <= spec.rank <= MAX_RANK:
        raise InvalidInputError("rank", spec.rank, f"an integer in [1, {MAX_RANK}]")
    if not _is_number(spec.alpha) or not 0 < spec.alpha <= sys.float_info.max:
        raise InvalidInputError("alpha", spec.alpha, "a finite number > 0")
    if not _is_names(spec.target_modules):
        raise InvalidInputError("target_modules", spec.target_modules, 'module names, "all-linear", a pattern or None')
    _check_options(spec)
    if spec.seed is None:
        return replace(spec, seed=SystemRandom().randrange(_SEED_RANGE))
    if not _is_int(spec.seed) or not -_SEED_RANGE <= spec.seed < _SEED_RANGE:
        raise InvalidInputError("seed", spec.seed, "a 64-bit integer or None")
    return spec


def _check_options(spec: LoraSpec) -> None:
    if not _is_number(spec.dropout) or not 0 <= spec.dropout < 1:
        raise InvalidInputError("dropout", spec.dropout, "a number in [0, 1)")
    if not isinstance(spec.use_rslora, bool):
        raise InvalidInputError("use_rslora", spec.use_rslora, "True or False")
    for field, patterns in (("rank_pattern", spec.rank_pattern), ("alpha_pattern", spec.alpha_pattern)):
        if not isinstance(patterns, Mapping) or not all(isinstance(each, str) and each for each in patterns):
            raise InvalidInputError(field, patterns, "a mapping of module names or patterns")
        for pattern in patterns:
            _compiled(field, pattern)
    for pattern, rank in spec.rank_pattern.items():
        if not _is_int(rank) or not 1 <= rank <= MAX_RANK:
            raise InvalidInputError(f"rank_pattern[{pattern!r}]", rank, f"an integer in [1, {MAX_RANK}]")
    for pattern, alpha in spec.alpha_pattern.items():
        if not _is_number(alpha) or not 0 < alpha <= sys.float_info.max:
            raise InvalidInputError(f"alpha_pattern[{pattern!r}]", alpha, "a finite number > 0")
    if not _is_names(spec.exclude_modules):
        raise InvalidInputError("exclude_modules", spec.exclude_modules, "module names, a pattern or None")
    if isinstance(spec.exclude_modules, str):
        _compiled("exclude_modules", spec.exclude_modules)
    _check_layers(spec)
    if not isinstance(spec.init_weights, bool | str) or spec.init_weights not in INIT_WEIGHTS:
        raise InvalidInputError("init_weights", spec.init_weights, f"one of {INIT_WEIGHTS}")


def _check_layers(spec: LoraSpec) -> None:
    layers, pattern = spec.layers_to_transform, spec.layers_pattern
    is_list = isinstance(layers, Sequence) and all(map(_is_int, layers))
    if layers is not None and not _is_int(layers) and not is_list:
        raise InvalidInputError("layers_to_transform", layers, "numbers of layers, counted from 0, or None")
    if not _is_names(pattern):
        raise InvalidInputError("layers_pattern", pattern, "names of lists of layers or None")
    if pattern and layers is None:  # this error and the next are PEFT's, too
        raise InvalidInputError("layers_pattern", pattern, "nothing without layers_to_transform")
    if layers is not None and isinstance(spec.target_modules, str):
        raise InvalidInputError("layers_to_transform", layers, "nothing where target_modules is a string: name modules")
    for each in [pattern] if isinstance(pattern, str) else pattern or ():
        _compiled("layers_pattern", each)


def check_ranks(spec: LoraSpec, targets: Sequence[Target]) -> list[int]:
    """Return the rank of each target; raise if one is not possible with the spec's initial weights."""
    names = [target.name for target in targets]
    ranks = spec.module_ranks(names)
    for name, rank in zip(names, ranks, strict=True):
        if rank % 2 and spec.init_weights == "orthogonal":
            raise InvalidInputError(f"the rank of {name}", rank, "an even number for init_weights 'orthogonal'")
    return ranks


def select_targets(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    """Return the target modules of a spec in model order, the head last."""
    chosen = _transformed(spec, _chosen(spec, architecture))
    kept = tuple(target for target in chosen if not _is_excluded(target.name, spec.exclude_modules))
    if not kept:
        raise InvalidInputError("exclude_modules", spec.exclude_modules, "names that leave some module to train")
    return kept


def warn_of_no_effect(spec: LoraSpec, architecture: Architecture) -> None:
    """Log a warning if a spec excludes modules that it would not have trained anyway; PEFT warns of that, too."""
    everything = select_targets(replace(spec, exclude_modules=None), architecture)
    if spec.exclude_modules and len(select_targets(spec, architecture)) == len(everything):
        logger.warning("exclude_modules: %r matches none of the target modules", spec.exclude_modules)


def _is_excluded(name: str, excluded: Sequence[str] | str | None) -> bool:
    if isinstance(excluded, str):
        return bool(excluded) and re.fullmatch(excluded, name) is not None
    return any(_matches(name, each) for each in excluded or ())


def _transformed(spec: LoraSpec, chosen: tuple[Target, ...]) -> tuple[Target, ...]:
    """Return the targets in the layers that ``layers_to_transform`` names, and those whose full names are given.

    Other targets are left out, as in PEFT.
    """
    layers = spec.layers_to_transform
    if layers is None or layers == [] or layers == ():
        return chosen
    wanted = {layers} if isinstance(layers, int) else set(layers)
    names = [spec.layers_pattern] if isinstance(spec.layers_pattern, str) else spec.layers_pattern or ()
    patterns = [re.compile(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.") for name in names if name]
    patterns = patterns or [re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")]
    kept = []
    for target in chosen:
        found = next((match for pattern in patterns if (match := pattern.match(target.name))), None)
        if target.name in (spec.target_modules or ()) or (found is not None and int(found["index"]) in wanted):
            kept.append(target)
    if not kept:
        raise InvalidInputError("layers_to_transform", layers, "numbers of layers that have target modules")
    return tuple(kept)


def _chosen(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
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
    compiled = _compiled("target_modules", pattern)
    return [target for target in candidates if compiled.fullmatch(target.name)]


def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidInputError(field, pattern, f"a regular expression ({error})") from error


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
