"""PEFT's ``LoraConfig`` at our edge: read one into a :class:`LoraSpec`, write one beside an adapter's weights.

Works on mappings, the contents of adapter_config.json or ``LoraConfig.to_dict()``; PEFT itself is not imported.
"""

import sys
from collections.abc import Collection, Mapping, Sequence

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.types import LoraSpec

__all__ = ["peft_config", "spec_from_peft"]

# What we read, with PEFT's defaults.
READ: Mapping[str, object] = {"r": 8, "lora_alpha": 8, "target_modules": None}

# What changes nothing about the adapter: any value passes. megatron_core and qalora_group_size say something only with
# megatron_config and use_qalora, which are refused; PEFT, too, ignores a runtime_config that it finds in a file.
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

# What must keep one of these values.
RESTRICTED: Mapping[str, tuple[object, ...]] = {"peft_type": ("LORA",), "task_type": (None, "CAUSAL_LM")}

# What we do not implement, with PEFT's defaults, which mean that it is not used.
UNIMPLEMENTED: Mapping[str, object] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "modules_to_save": None,
    "monteclora_config": None,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

# In an error: so many fields, each with so many characters. A server repeats them to whoever sent them.
_NAMED, _SHOWN = 16, 120


def spec_from_peft(config: Mapping[str, object]) -> LoraSpec:
    """The spec of an adapter that PEFT would make from ``config``; a field left out has PEFT's default.

    Raises :class:`UnsupportedError` with every field that asks for something we do not implement. A field nobody knows
    (of another PEFT version) may be there if it is null, false or empty.
    """
    refused = [f"{name}={value!r}" for name, value in sorted(config.items()) if not _is_implemented(name, value)]
    if refused:
        named = ", ".join(each[:_SHOWN] for each in refused[:_NAMED])
        more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        raise UnsupportedError(f"LoraConfig fields with values that Twinkle does not implement: {named}{more}")
    fields = {**READ, **config}
    return LoraSpec(
        rank=_rank(fields["r"]),
        alpha=_alpha(fields["lora_alpha"]),
        target_modules=_target_modules(fields["target_modules"]),
    )


def peft_config(spec: LoraSpec, target_modules: Sequence[str], base_model: str) -> dict[str, object]:
    """The contents of adapter_config.json for an adapter of ``base_model`` that has weights for ``target_modules``.

    Only fields that PEFT has had for long: older versions, and servers with a reader of their own, warn about the rest.
    """
    alpha = float(spec.alpha)
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # PEFT declares an int
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": sorted(set(target_modules)),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _is_implemented(name: str, value: object) -> bool:
    if name in READ or name in INFORMATIVE:
        return True
    if name in RESTRICTED:
        return value in RESTRICTED[name]
    default = UNIMPLEMENTED.get(name)
    return value == default or (_is_empty(value) and _is_empty(default))


def _is_empty(value: object) -> bool:
    """Null, false or without elements. Not 0: ``layers_to_transform=0`` means the first layer."""
    return value is None or value is False or (isinstance(value, Collection) and len(value) == 0)


def _rank(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError("r", value, "an integer of at least 1")
    return value


def _alpha(value: object) -> float:
    # compared, not converted: an int may be too large for a float; NaN is not within any bound
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise InvalidInputError("lora_alpha", value, "a finite number")
    return float(value)


def _target_modules(value: object) -> tuple[str, ...] | str:
    """Names sorted, so that equal sets give equal specs. A string is "all-linear" or, as in PEFT, a pattern."""
    if isinstance(value, str) and value:
        return "all-linear" if value.lower() == "all-linear" else value
    if isinstance(value, Collection) and value and all(isinstance(name, str) and name for name in value):
        return tuple(sorted(set(value)))
    # PEFT's default, None, is a table by architecture; ours would be other modules, so nobody gets it unasked
    raise InvalidInputError("target_modules", value, 'module names, or "all-linear"')
