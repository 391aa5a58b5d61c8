"""Conversion between PEFT's ``LoraConfig`` and :class:`LoraSpec`, and the note beside adapters that train the head.

Works on mappings: the contents of adapter_config.json, or ``LoraConfig.to_dict()``. PEFT itself is not imported.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.types import EXPERT_PARAMETERS, INIT_WEIGHTS, LoraSpec, first_matches, name_in_decoder

__all__ = ["NOTE", "head_note", "misread_modules", "peft_config", "spec_from_peft", "trains_head"]

N = TypeVar("N", int, float)

# Fields that we read, with PEFT's defaults.
READ: Mapping[str, object] = {
    "alpha_pattern": {},
    "exclude_modules": None,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "r": 8,
    "rank_pattern": {},
    "target_modules": None,
    "target_parameters": None,
    "use_rslora": False,
}

# Fields that do not affect the adapter: any value is accepted. megatron_core and qalora_group_size only matter together
# with megatron_config and use_qalora, which are refused; PEFT, too, ignores a runtime_config that it finds in a file.
INFORMATIVE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)

# Fields that must have one of these values.
RESTRICTED: Mapping[str, tuple[object, ...]] = {"peft_type": ("LORA",), "task_type": (None, "CAUSAL_LM")}

# Fields of features that we do not implement, with PEFT's defaults, which mean that the feature is not used.
UNIMPLEMENTED: Mapping[str, object] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "modules_to_save": None,
    "monteclora_config": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}

_BASE = "would change weights of the base model, which all adapters share"
# Why some of these are not implemented. TransformersModel, whose base model belongs to one user, hands them to PEFT.
_REASONS: Mapping[str, str] = {
    "bias": _BASE,
    "modules_to_save": _BASE,
    "trainable_token_indices": _BASE,
}
# Values of init_lora_weights for which PEFT subtracts the initial adapter from the base weights.
_INIT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# The most fields that an error names, and the most characters it shows of each: a server sends the error to its client.
_NAMED, _SHOWN = 16, 120


def spec_from_peft(config: Mapping[str, object]) -> LoraSpec:
    """Return the spec of the adapter that PEFT would make from ``config``; missing fields have PEFT's defaults.

    Raises :class:`UnsupportedError` that lists fields with values we do not implement (at most 16), or
    :class:`InvalidInputError`, also if ``target_modules`` is missing. An unknown field (of another PEFT version) is
    accepted if it is null, false or empty.
    """
    refused = [_refusal(name, value) for name, value in sorted(config.items()) if not _is_implemented(name, value)]
    if refused:
        more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise UnsupportedError(
            "LoraConfig fields with values that adapters on a shared base model do not support "
            f"(TransformersModel hands them to PEFT): {', '.join(refused[:_NAMED])}{more}"
        )
    fields = {**READ, **config}
    parameters = _names("target_parameters", fields["target_parameters"])
    if isinstance(parameters, str):
        raise InvalidInputError("target_parameters", parameters, "a list of names of parameters")
    return LoraSpec(
        rank=_rank("r", fields["r"]),
        alpha=_alpha("lora_alpha", fields["lora_alpha"]),
        target_modules=_target_modules(fields["target_modules"], parameters),
        dropout=_dropout(fields["lora_dropout"]),
        use_rslora=_flag("use_rslora", fields["use_rslora"]),
        rank_pattern=_pattern("rank_pattern", fields["rank_pattern"], _rank),
        alpha_pattern=_pattern("alpha_pattern", fields["alpha_pattern"], _alpha),
        exclude_modules=_names("exclude_modules", fields["exclude_modules"]),
        layers_to_transform=_layers(fields["layers_to_transform"]),
        layers_pattern=_names("layers_pattern", fields["layers_pattern"]),
        init_weights=_init(fields["init_lora_weights"]),
        target_parameters=parameters,
    )


def peft_config(
    spec: LoraSpec, target_modules: Sequence[str], base_model: str, modules: Sequence[str] = ()
) -> dict[str, object]:
    """Return the adapter_config.json of an adapter of ``base_model`` that has weights for ``target_modules``.

    ``modules``: the full names of the modules. It has only fields that PEFT has had for a long time: older versions of
    PEFT, and other programs that read these files, warn about fields they do not know. So fields of newer options are
    only there if the adapter uses them.

    Names of experts' parameters among ``target_modules`` become PEFT's ``target_parameters``.
    """
    parameters = [name for name in target_modules if f".{name}".endswith(EXPERT_PARAMETERS)]
    if parameters:
        misread = misread_modules(modules)
        lasts = {name.rpartition(".")[2] for name in misread}
        named_anew = {*parameters, *(name for name in target_modules if name.rpartition(".")[2] in lasts)}
        target_modules = [name for name in target_modules if name not in named_anew]
        parameters += [f"{name_in_decoder(name)}.weight" for name in misread]
    config: dict[str, object] = {
        "alpha_pattern": _unordered(spec.alpha_pattern, modules, spec.alpha, _plain),
        "auto_mapping": None,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": spec.init_weights,
        "lora_alpha": _plain(spec.alpha),
        "lora_dropout": spec.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": _unordered(spec.rank_pattern, modules, spec.rank, int),
        "revision": None,
        "target_modules": sorted(set(target_modules)),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": spec.use_rslora,
    }
    for name in ("exclude_modules", "layers_pattern", "layers_to_transform"):
        value = vars(spec)[name]
        if value is not None:
            config[name] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    if parameters:
        config["target_parameters"] = sorted(parameters)
    return dict(sorted(config.items()))


def misread_modules(modules: Iterable[str]) -> list[str]:
    """Return the linear layers that PEFT finds only by the names of their parameters.

    In models with experts it takes a module named ``gate_proj``, ``up_proj`` or ``down_proj`` for one of the experts.
    """
    names = {"gate_proj", "up_proj", "down_proj"}
    return [name for name in modules if name.rpartition(".")[2] in names and not name.endswith(EXPERT_PARAMETERS)]


# The file with head_note, beside adapter_config.json. Not README.md, which tools that upload adapters write themselves.
NOTE = "USAGE.md"

_HEAD_NOTE = """\
# Using this adapter

This LoRA adapter also changes the output head of its base model (`{base_model}`).

- PEFT and Transformers apply all of it: `PeftModel.from_pretrained(base, folder)`, `base.load_adapter(folder)`.
- tinker-cookbook's `build_lora_adapter` and `build_hf_model` read these files as they are.
- vLLM does not apply an adapter to the output head, so its results differ from the trained model's. For vLLM, train
  with `train_unembed=False`, or serve a merged model.
- Before you merge: if the base model ties its head to its input embeddings (`tie_word_embeddings` in its config.json),
  a merge would change the embeddings as well and give other results. Merge into an untied copy of the base model:

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base_model}", dtype="auto")
base.config.tie_word_embeddings = False
base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
base.save_pretrained("base-untied")
AutoTokenizer.from_pretrained("{base_model}").save_pretrained("base-untied")
```
"""


def trains_head(modules: Iterable[str]) -> bool:
    """Return whether one of the modules is the output head: every other module that we train is in a decoder layer."""
    return any("layers" not in module.split(".") for module in modules)


def head_note(base_model: str) -> str:
    """Return the contents of the file ``NOTE``: which programs apply the part of the adapter that is on the head."""
    return _HEAD_NOTE.format(base_model=base_model)


def _unordered(
    patterns: Mapping[str, N], modules: Sequence[str], default: N, written: Callable[[N], object]
) -> dict[str, object]:
    """Return patterns that give the modules the same values in any order: JSON objects may be sorted on their way.

    They are the patterns as given, or one for each module if the order decides which of them counts, or if they have
    the name of a vision model's decoder, which modules of the text model lack.
    """
    values = first_matches(patterns, modules, default)
    of_vision = any("language_model" in pattern for pattern in patterns)
    if not of_vision and first_matches(dict(sorted(patterns.items())), modules, default) == values:
        return {pattern: written(value) for pattern, value in patterns.items()}
    changed = ((name, value) for name, value in zip(modules, values, strict=True) if value != default)
    return {name_in_decoder(name).replace(".", r"\."): written(value) for name, value in changed}


def _plain(alpha: float) -> int | float:
    """Return an int where that is the same number: PEFT declares an int."""
    return int(alpha) if float(alpha).is_integer() else float(alpha)


def _refusal(name: str, value: object) -> str:
    """Return a refused field with its value, and with the reason where one is known."""
    reason = _REASONS.get(name)
    if name == "init_lora_weights" and isinstance(value, str) and value.lower().startswith(_INIT_CHANGES_BASE):
        reason = _BASE
    return f"{name}={value!r}"[:_SHOWN] + (f" ({reason})" if reason else "")


def _is_implemented(name: str, value: object) -> bool:
    if name == "init_lora_weights":
        return value is True or value is False or (isinstance(value, str) and value.lower() in INIT_WEIGHTS)
    if name in READ or name in INFORMATIVE:
        return True
    if name in RESTRICTED:
        return value in RESTRICTED[name]
    default = UNIMPLEMENTED.get(name)
    return value == default or (_is_empty(value) and _is_empty(default))


def _is_empty(value: object) -> bool:
    """Return whether a value is null, false or empty. 0 is not: ``layers_to_transform=0`` means the first layer."""
    return value is None or value is False or (isinstance(value, Collection) and len(value) == 0)


def _rank(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(field, value, "an integer of at least 1")
    return value


def _alpha(field: str, value: object) -> float:
    # Compared before it is converted, since an int may be too large for a float. NaN fails every comparison.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise InvalidInputError(field, value, "a finite number")
    return float(value)


def _dropout(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise InvalidInputError("lora_dropout", value, "a number in [0, 1)")
    return float(value)


def _flag(field: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidInputError(field, value, "True or False")
    return bool(value)


def _pattern(field: str, value: object, read: Callable[[str, object], N]) -> dict[str, N]:
    if _is_empty(value):
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise InvalidInputError(field, value, "values by module names or patterns of names")
    return {pattern: read(f"{field}[{pattern!r}]", each) for pattern, each in value.items()}


def _layers(value: object) -> tuple[int, ...] | int | None:
    if _is_empty(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, Collection) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return tuple(sorted(set(value)))
    raise InvalidInputError("layers_to_transform", value, "numbers of layers, counted from 0")


def _names(field: str, value: object) -> tuple[str, ...] | str | None:
    """Return names sorted; a string, which is a pattern, as it is; None if there are none."""
    if _is_empty(value):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, Collection) and all(isinstance(name, str) and name for name in value):
        return tuple(sorted(set(value)))
    raise InvalidInputError(field, value, "module names, or a pattern of names")


def _init(value: object) -> bool | str:
    assert isinstance(value, bool | str), "other values are not implemented"
    return value if isinstance(value, bool) else value.lower()


def _target_modules(value: object, parameters: tuple[str, ...] | None) -> tuple[str, ...] | str:
    """Return names sorted, so that equal sets give equal specs. A string is "all-linear" or, as in PEFT, a pattern.

    A collection of the one name "all-linear" means the same as the string. With ``parameters`` there may be none.
    """
    named = _names("target_modules", value)
    if named is None and parameters:
        return ()
    if named is None:
        # PEFT's default, None, chooses modules by a table of architectures. We have no such table.
        raise InvalidInputError("target_modules", value, 'module names, or "all-linear"')
    only = named[0] if not isinstance(named, str) and len(named) == 1 else named
    return "all-linear" if isinstance(only, str) and only.lower() == "all-linear" else named
