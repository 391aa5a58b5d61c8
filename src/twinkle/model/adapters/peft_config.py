"""Conversion between PEFT's ``LoraConfig`` and :class:`LoraSpec`, and the note beside adapters that train the head.

Works on mappings: the contents of adapter_config.json, or ``LoraConfig.to_dict()``. PEFT itself is not imported.
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.types import LoraSpec

__all__ = ["NOTE", "head_note", "peft_config", "spec_from_peft", "trains_head"]

# Fields that we read, with PEFT's defaults.
READ: Mapping[str, object] = {"r": 8, "lora_alpha": 8, "target_modules": None}

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

# The most fields that an error names, and the most characters it shows of each: a server sends the error to its client.
_NAMED, _SHOWN = 16, 120


def spec_from_peft(config: Mapping[str, object]) -> LoraSpec:
    """Return the spec of the adapter that PEFT would make from ``config``; missing fields have PEFT's defaults.

    Raises :class:`UnsupportedError` that lists fields with values we do not implement (at most 16), or
    :class:`InvalidInputError`, also if ``target_modules`` is missing. An unknown field (of another PEFT version) is
    accepted if it is null, false or empty.
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
    """Return the adapter_config.json of an adapter of ``base_model`` that has weights for ``target_modules``.

    It has only fields that PEFT has had for a long time: older versions of PEFT, and other programs that read these
    files, warn about fields they do not know.
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


def _is_implemented(name: str, value: object) -> bool:
    if name in READ or name in INFORMATIVE:
        return True
    if name in RESTRICTED:
        return value in RESTRICTED[name]
    default = UNIMPLEMENTED.get(name)
    return value == default or (_is_empty(value) and _is_empty(default))


def _is_empty(value: object) -> bool:
    """Return whether a value is null, false or empty. 0 is not: ``layers_to_transform=0`` means the first layer."""
    return value is None or value is False or (isinstance(value, Collection) and len(value) == 0)


def _rank(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError("r", value, "an integer of at least 1")
    return value


def _alpha(value: object) -> float:
    # Compared before it is converted, since an int may be too large for a float. NaN fails every comparison.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise InvalidInputError("lora_alpha", value, "a finite number")
    return float(value)


def _target_modules(value: object) -> tuple[str, ...] | str:
    """Return names sorted, so that equal sets give equal specs. A string is "all-linear" or, as in PEFT, a pattern."""
    if isinstance(value, str) and value:
        return "all-linear" if value.lower() == "all-linear" else value
    if isinstance(value, Collection) and value and all(isinstance(name, str) and name for name in value):
        return tuple(sorted(set(value)))
    # PEFT's default, None, chooses modules by a table of architectures. We have no such table, so None is refused.
    raise InvalidInputError("target_modules", value, 'module names, or "all-linear"')
