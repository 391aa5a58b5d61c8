"""Objects as arguments of a request: text for those of our own, whatever they are made of, and never code.

A DatasetMeta and a LoraConfig (also the library's and PEFT's) become JSON text that says what it is. The client's own
requests are written by :mod:`twinkle_client.client.json_body`; this is for programs that write some by themselves.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from twinkle_client.dataset.meta import DatasetMeta, is_meta, own_meta
from twinkle_client.errors import invalid
from twinkle_client.model.lora_config import LoraConfig, config_text, is_lora_config
from twinkle_client.protocol.base import TYPE_KEY

__all__ = ["deserialize_object", "serialize_object"]

_RANGE, _LIST = "range", "list"


def serialize_object(value: object) -> Any:
    """Text for a DatasetMeta, a LoraConfig or a mapping; a pydantic model's fields; plain values as they are."""
    if value is None or isinstance(value, str | int | float | list):
        return value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_meta(value):
        return own_meta(value).to_wire()
    if is_lora_config(value):
        return config_text(value, "all-linear")
    if isinstance(value, Mapping):
        return json.dumps(dict(value), allow_nan=False)
    raise invalid("value", value, "what JSON can say, a DatasetMeta, a LoraConfig or a pydantic model; code never is")


def deserialize_object(value: Any) -> Any:
    """What :func:`serialize_object` was given. Text that is no JSON object or list is itself, and so is all else.

    A LoraConfig comes back as ours, with the fields that it has.
    """
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(value)
    except ValueError:
        return value
    if not isinstance(content, dict | list):
        return value  # "8" is a text, too
    if not isinstance(content, dict) or TYPE_KEY not in content:
        return content
    kind = content.pop(TYPE_KEY)
    if kind == "LoraConfig":
        known = {field.name for field in fields(LoraConfig)}
        return LoraConfig(**{name: field for name, field in content.items() if name in known})
    if kind == "DatasetMeta":
        return DatasetMeta(**{**content, "data_slice": _slice(content.get("data_slice"))})
    raise invalid(TYPE_KEY, kind, "DatasetMeta or LoraConfig")


def _slice(said: Mapping[str, Any] | None) -> range | list[int] | None:
    if said is None:
        return None
    if said["_slice_type_"] == _RANGE:
        return range(said["start"], said["stop"], said["step"])
    if said["_slice_type_"] == _LIST:
        return list(said["values"])
    raise invalid("data_slice._slice_type_", said["_slice_type_"], f"{_RANGE} or {_LIST}")
