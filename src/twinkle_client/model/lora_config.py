"""The configuration of a LoRA adapter, in each form that a script may have it."""

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from twinkle_client.errors import invalid
from twinkle_client.protocol.base import TYPE_KEY

__all__ = ["LoraConfig", "config_text", "is_lora_config", "modules_of"]


@dataclass(frozen=True)
class LoraConfig:
    """The fields of ``peft.LoraConfig`` that the server uses, for programs without peft."""

    r: int = 8
    lora_alpha: int = 8
    target_modules: str | Iterable[str] | None = "all-linear"
    lora_dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: str | Iterable[str] | None = None
    layers_to_transform: int | Iterable[int] | None = None
    layers_pattern: str | Iterable[str] | None = None
    init_lora_weights: bool | str = True
    target_parameters: Iterable[str] | None = None


@runtime_checkable
class _PeftConfig(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def is_lora_config(value: object) -> bool:
    """Return whether a value is our LoraConfig or, like PEFT's, an object with ``to_dict``."""
    return isinstance(value, LoraConfig | _PeftConfig) and not isinstance(value, Mapping | type)


def config_text(config: object, target_modules: str | Iterable[str]) -> str:
    """Return ``config`` as JSON text for add_adapter_to_model.

    Without target modules it gets ``target_modules``, unless it has target parameters: then it is on these alone.
    """
    said = _said("config", config)
    if said.get("target_modules") is None and not said.get("target_parameters"):
        said["target_modules"] = _value(target_modules)
    return json.dumps({**said, TYPE_KEY: "LoraConfig"}, allow_nan=False)


def modules_of(config: object, default: str | Iterable[str]) -> str | Iterable[str]:
    """Return the target modules that a config names, else ``default``."""
    modules: str | Iterable[str] | None = _said("lora_config", config).get("target_modules")
    return default if modules is None else modules


def _said(field: str, config: object) -> dict[str, Any]:
    if isinstance(config, LoraConfig):
        fields: Mapping[str, Any] = asdict(config)
    elif isinstance(config, Mapping):
        fields = config
    elif isinstance(config, _PeftConfig):
        fields = config.to_dict()
    else:
        raise invalid(field, config, "a LoraConfig (peft's, or twinkle_client.LoraConfig), or its fields")
    return {str(name): _value(value) for name, value in fields.items() if _can_be_said(value)}


def _can_be_said(value: object) -> bool:
    """Return whether JSON can express a value; PEFT's configs also hold internal objects, which are left out."""
    return value is None or isinstance(value, str | int | float | bool | Mapping | list | tuple | AbstractSet)


def _value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items() if _can_be_said(item)}
    if isinstance(value, AbstractSet):
        return sorted(value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return [_value(item) for item in value]
