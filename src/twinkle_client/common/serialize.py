"""Serialize objects as arguments of a request; code is never serialized.

A DatasetMeta and a LoraConfig (also the library's and PEFT's) become JSON text that contains the name of the type. The
client encodes its own requests with :mod:`twinkle_client.client.json_body`; this module is for programs that write
requests themselves.
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
    """Return JSON text for a DatasetMeta, LoraConfig or mapping, the fields of a pydantic model, or a plain value."""
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
    raise invalid("value", value, "a JSON value, a DatasetMeta, a LoraConfig or a pydantic model, but no code")


def deserialize_object(value: Any) -> Any:
    """Return a DatasetMeta or LoraConfig that :func:`serialize_object` was given, or the object or list of a JSON text.

    Text that is not a JSON object or list, and values that are not text, are returned unchanged. A LoraConfig is
    returned as :class:`twinkle_client.LoraConfig`, with the fields that this class has.
    """
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(value)
    except ValueError:
        return value
    if not isinstance(content, dict | list):
        return value  # a text such as "8" stays a text
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
