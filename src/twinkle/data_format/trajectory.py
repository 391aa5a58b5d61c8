"""One conversation with its tools and media, and the user data that is kept with it."""

import json
from typing import Any, TypedDict

from twinkle.data_format.message import Message, Tool

__all__ = ["Trajectory", "pack_value", "user_data_get"]


class Trajectory(TypedDict, total=False):
    """One conversation.

    ``user_data`` holds values for rewards and metrics, as pairs of a key and a JSON text. They are texts so that all
    values have the same Arrow type.
    """

    messages: list[Message]
    tools: list[Tool]
    user_data: list[tuple[str, str]]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    prompt: str


def pack_value(value: object) -> str:
    """Return the JSON text of a value for ``user_data``. Types that JSON does not know are converted by ``str``."""
    return json.dumps(value, ensure_ascii=False, default=str)


def user_data_get(items: object, key: str, default: Any = None) -> Any:
    """Return the value of the first pair with this key in ``user_data``.

    Values are parsed as JSON. A value that is not valid JSON, as other programs may write it, is returned unchanged.
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
