"""One conversation with everything that belongs to it, and the notes that travel with it."""

import json
from typing import Any, TypedDict

from twinkle.data_format.message import Message, Tool

__all__ = ["Trajectory", "pack_value", "user_data_get"]


class Trajectory(TypedDict, total=False):
    """``user_data``: notes for rewards and metrics, pairs of a key and a JSON text (one Arrow type for all values)."""

    messages: list[Message]
    tools: list[Tool]
    user_data: list[tuple[str, str]]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    prompt: str


def pack_value(value: object) -> str:
    """The JSON text of a value for ``user_data``; what JSON does not know is written as ``str`` writes it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def user_data_get(items: object, key: str, default: Any = None) -> Any:
    """The value of the first pair with this key in ``user_data``.

    Values are JSON texts, but notes that others wrote are handed over as they are when they are not.
    """
    if not isinstance(items, list | tuple):
        return default
    for item in items:
        if isinstance(item, list | tuple) and len(item) == 2 and item[0] == key:
            return _unpack(item[1])
    return default


def _unpack(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
