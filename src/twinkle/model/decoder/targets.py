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
from twinkle.model.types import EXPERT_FORMS, INIT_WEIGHTS, LoraSpec, TrainingSpec, name_in_decoder, text_name

logger = logging.getLogger(__name__)

MAX_RANK = 512
_SEED_RANGE = 2**63
# Linear layers that the switches leave out, as Tinker's do: inner ones of multi-head latent attention, and the gates of
# linear attention. Their names choose them.
_LEFT_OUT = frozenset({"q_b_proj", "kv_b_proj", "in_proj_a", "in_proj_b"})


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
    _check_experts(spec)


def _check_experts(spec: LoraSpec) -> None:
    if not isinstance(spec.experts, str) or spec.experts not in EXPERT_FORMS:
        raise InvalidInputError("experts", spec.experts, f"one of {EXPERT_FORMS}")
    parameters = spec.target_parameters
    if isinstance(parameters, str) or not _is_names(parameters):
        raise InvalidInputError("target_parameters", parameters, "a list of names of parameters or None")
    by_names = spec.target_modules is not None or parameters is not None
    if spec.experts != EXPERT_FORMS[0] and (by_names or not spec.train_mlp):
        raise InvalidInputError(
            "experts", spec.experts, f"{EXPERT_FORMS[0]!r}, unless train_mlp chooses the modules and no names do"
        )


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
    parameters = _parameters(spec, architecture)
    chosen = _transformed(spec, _chosen(spec, architecture))
    kept = {target.name for target in chosen if not _is_excluded(target.name, spec.exclude_modules)}
    if not kept and not parameters:
        raise InvalidInputError("exclude_modules", spec.exclude_modules, "names that leave some module to train")
    for name in sorted(parameters):
        experts = name.rpartition(".")[0]
        if name in kept or not kept.isdisjoint(f"{experts}.{each}" for each in ("w1", "w2", "w3")):
            raise InvalidInputError("target_parameters", name, "no part of the modules that target_modules names")
    wanted = kept | parameters
    for split in architecture.split:  # names in target_modules alone were checked before
        parts = [_last(part.name) for part in split.parts if part.name in wanted]
        if split.whole.name in wanted and parts:
            allowed = f"nothing beside {', '.join(parts)} in target_modules, which are parts of it"
            raise InvalidInputError("target_parameters", f"{split.whole.name}.weight", allowed)
    every = (*architecture.projections, *architecture.shared_outer, *architecture.independent, architecture.head)
    targets = tuple(target for target in every if target.name in wanted)
    if spec.dropout and any(target.copies is not None for target in targets):  # PEFT refuses it, too
        raise InvalidInputError("dropout", spec.dropout, "0 for an adapter on experts")
    return targets


def _parameters(spec: LoraSpec, architecture: Architecture) -> set[str]:
    """Return the names of the targets that ``target_parameters`` names.

    As in PEFT, the options that choose among modules do not choose among these.
    """
    named = {target.name: target.name for target in architecture.independent}
    named |= {f"{target.name}.weight": target.name for target in (*architecture.linear, architecture.head)}
    chosen = set()
    for wanted in spec.target_parameters or ():
        found = {module for parameter, module in named.items() if _matches(parameter, wanted)}
        if not found:
            allowed = sorted({_place(target.name) for target in architecture.independent})
            raise InvalidInputError("target_parameters", wanted, f"one of {[*allowed, '<linear layer>.weight']}")
        chosen |= found
    if spec.target_parameters and spec.dropout:  # PEFT refuses it, too
        raise InvalidInputError("dropout", spec.dropout, "0 with target_parameters")
    return chosen


def warn_of_no_effect(spec: LoraSpec, architecture: Architecture) -> None:
    """Log a warning if a spec excludes modules that it would not have trained anyway; PEFT warns of that, too."""
    everything = select_targets(replace(spec, exclude_modules=None), architecture)
    if spec.exclude_modules and len(select_targets(spec, architecture)) == len(everything):
        logger.warning("exclude_modules: %r matches none of the target modules", spec.exclude_modules)


def _is_excluded(name: str, excluded: Sequence[str] | str | None) -> bool:
    if isinstance(excluded, str):
        return bool(excluded) and _fits(re.compile(excluded), name)
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
        if any(_is_same(target.name, each) for each in spec.target_modules or ()) or (
            found is not None and int(found["index"]) in wanted
        ):
            kept.append(target)
    if not kept:
        raise InvalidInputError("layers_to_transform", layers, "numbers of layers that have target modules")
    return tuple(kept)


def _chosen(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    if spec.target_parameters and not spec.target_modules:
        return ()
    if spec.target_modules is None:
        return _by_switches(spec, architecture)
    if spec.target_modules == "all-linear":
        _refuse_experts("target_modules", architecture, "name the attention layers instead")
        return architecture.linear  # experts are no linear layers: PEFT leaves them out, too
    candidates = (*architecture.projections, *architecture.shared_outer, architecture.head)
    if isinstance(spec.target_modules, str):  # as in PEFT, any other string is a pattern for full names
        chosen = _wholes(_by_pattern(spec.target_modules, candidates), architecture)
    else:
        for wanted in spec.target_modules:
            if not any(_matches(target.name, wanted) for target in candidates):
                raise InvalidInputError("target_modules", wanted, f"one of {_short_names(architecture)}")
        chosen = [t for t in candidates if any(_matches(t.name, wanted) for wanted in spec.target_modules)]
        if len(_wholes(chosen, architecture)) < len(chosen):
            split = architecture.split[0]
            parts = ", ".join(_last(part.name) for part in split.parts)
            raise InvalidInputError(
                "target_modules", spec.target_modules, f"either {_last(split.whole.name)} or some of {parts}"
            )
    if not chosen:
        raise InvalidInputError("target_modules", spec.target_modules, f"some of {_short_names(architecture)}")
    return tuple(chosen)


def _wholes(chosen: list[Target], architecture: Architecture) -> list[Target]:
    """Return the targets without the projections of linear layers that are targets as a whole."""
    names = {target.name for target in chosen}
    covered = {part.name for split in architecture.split if split.whole.name in names for part in split.parts}
    return [target for target in chosen if target.name not in covered]


def short_names(targets: tuple[Target, ...], architecture: Architecture) -> list[str]:
    """Return target names for adapter_config.json: last path components, or full names where those are ambiguous.

    A name is ambiguous if PEFT would also match modules that are not targets. Full names in a vision model begin behind
    its decoder's name where they can, so that they also fit the text model of its family.
    """
    names = {target.name for target in targets if not target.is_parameter}
    parameters = _short_parameters({target.name for target in targets if target.is_parameter}, architecture)
    named = (*architecture.projections, *architecture.shared_outer)
    everything = architecture.module_names | {target.name for target in named}
    for shorten in (_last, name_in_decoder):
        shorter = {shorten(name) for name in names}
        if names == {name for name in everything if _ends(name) & shorter}:
            return sorted(shorter | parameters)
    return sorted(names | parameters)


def _short_parameters(names: set[str], architecture: Architecture) -> set[str]:
    """Return names of experts' parameters within their layers; the longer ones where not all layers are meant."""
    places = {_place(name) for name in names}
    meant = {target.name for target in architecture.independent if _place(target.name) in places}
    return places if names == meant else {name_in_decoder(name) for name in names}


def _place(name: str) -> str:
    """Return the name of an experts' parameter within its layer: ``mlp.experts.gate_up_proj``."""
    return re.split(r"(?:^|\.)layers\.\d+\.", name)[-1]


def _ends(name: str) -> set[str]:
    """Return the names by which PEFT finds a module: its full name, and what follows any dot in it."""
    parts = name.split(".")
    return {".".join(parts[first:]) for first in range(len(parts))}


def _by_switches(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    if spec.train_mlp:
        _refuse_experts("train_mlp", architecture, "create the adapter with train_mlp=False")
    chosen: tuple[Target, ...] = ()
    if spec.train_attn:
        parts = {split.whole.name: split.parts for split in architecture.split}
        for target in architecture.attention:
            if _last(target.name) not in _LEFT_OUT:
                chosen += parts.get(target.name, (target,))
    if spec.train_mlp:
        chosen += architecture.mlp + _experts(spec, architecture)
    if spec.train_unembed:
        chosen += (architecture.head,)
    if not chosen:
        raise InvalidInputError("train_attn, train_mlp, train_unembed", False, "at least one of them true")
    return chosen


def _experts(spec: LoraSpec, architecture: Architecture) -> tuple[Target, ...]:
    if spec.experts == EXPERT_FORMS[0]:
        return architecture.shared_outer
    if not architecture.experts:
        raise InvalidInputError("experts", spec.experts, f"{EXPERT_FORMS[0]!r}: {architecture.family} has no experts")
    return architecture.independent


def _refuse_experts(field: str, architecture: Architecture, advice: str) -> None:
    if architecture.has_other_experts:
        raise UnsupportedError(
            f"{field}: {architecture.family} has experts of a form on which LoRA is not supported; {advice}"
        )


def _by_pattern(pattern: str, candidates: tuple[Target, ...]) -> list[Target]:
    compiled = _compiled("target_modules", pattern)
    return [target for target in candidates if _fits(compiled, target.name)]


def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidInputError(field, pattern, f"a regular expression ({error})") from error


def _fits(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether a pattern matches one of a module's names: a vision model's modules have two."""
    return any(map(pattern.fullmatch, (name, text_name(name))))


def _is_same(name: str, wanted: str) -> bool:
    return text_name(name) == text_name(wanted)


def _matches(name: str, wanted: str) -> bool:
    return _is_same(name, wanted) or text_name(name).endswith("." + text_name(wanted))


def _short_names(architecture: Architecture) -> list[str]:
    named = (*architecture.projections, *architecture.shared_outer, architecture.head)
    return sorted({_last(target.name) for target in named})


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
