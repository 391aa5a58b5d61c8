"""Conversion of messages from the forms that users write to the form that chat templates read.

The originals are not changed.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from twinkle.data_format import pack_value, user_data_get
from twinkle.errors import InvalidInputError, UnsupportedError

__all__ = [
    "key_rounds",
    "nested_names",
    "only_text",
    "plain_text",
    "refuse_beside_tokens",
    "renderable",
    "split_reasoning",
    "tools_of",
    "with_system",
]

Dict = dict[str, Any]

_MEDIA = ("images", "videos", "audios")


def conversation(trajectory: Mapping[str, Any]) -> list[Dict]:
    """Return the messages of a trajectory without keys that are None, which a table adds to its rows."""
    messages = trajectory.get("messages")
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInputError("messages", messages, "a list of at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInputError("messages", message, "dicts with a 'role'")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def with_system(trajectory: Dict, system: str) -> Dict:
    """Put a system message first, if the first message is the user's. ``key_rounds`` in ``user_data`` move by one."""
    messages = trajectory["messages"]
    if messages[0]["role"] != "user":
        return trajectory
    changed = {**trajectory, "messages": [{"role": "system", "content": system}, *messages]}
    rounds = user_data_get(trajectory.get("user_data"), "key_rounds")
    if rounds:
        changed["user_data"] = [
            (key, pack_value([number + 1 for number in rounds]) if key == "key_rounds" else value)
            for key, value in trajectory["user_data"]
        ]
    return changed


def split_reasoning(message: Dict, split: bool) -> Dict:
    """Return an assistant's message with a ``reasoning_content``, taken from ``<think>`` tags in its text if needed.

    ``split=False`` does not change the text, for templates that print only the text. Messages of other roles are
    returned unchanged.
    """
    if message["role"] != "assistant" or isinstance(message.get("reasoning_content"), str):
        return message
    content = message.get("content")
    if split and isinstance(content, str) and "</think>" in content:
        thought, _, answer = content.partition("</think>")
        before, opened, inner = thought.partition("<think>")
        if not opened or not before.strip():  # text before the thought must stay in the text
            reasoning = inner if opened else thought
            return {**message, "reasoning_content": reasoning.strip("\n"), "content": answer.lstrip("\n")}
    return {**message, "reasoning_content": ""}


def plain_text(message: Dict) -> Dict:
    """Return the message with its blocks of text joined into one text. Media are refused."""
    media = [key for key in _MEDIA if message.get(key)]
    content = message.get("content", "")
    if isinstance(content, str) and not media:
        return message if "content" in message else {**message, "content": ""}
    if media:
        raise _no_media(media[0])
    if not isinstance(content, list | tuple):
        raise InvalidInputError("content", content, "a text, or a list of blocks")
    return {**message, "content": "".join(_block_text(block) for block in content)}


def refuse_media(trajectory: Mapping[str, Any]) -> None:
    for key in _MEDIA:
        if trajectory.get(key):
            raise _no_media(key)
    refuse_beside_tokens(trajectory)


def refuse_beside_tokens(trajectory: Mapping[str, Any]) -> None:
    """Raise for ``multi_modal_data``, which rows of tokens have. A table may have filled it with None."""
    beside = trajectory.get("multi_modal_data")
    if any(value is not None for value in beside.values()) if isinstance(beside, Mapping) else beside:
        given = sorted(map(str, beside)) if isinstance(beside, Mapping) else beside
        raise InvalidInputError("multi_modal_data", given, "none in a conversation; its images are in 'images'")


def renderable(message: Dict, reasoning_fields: Collection[str]) -> Dict:
    """Return the message for a chat template: tool calls as objects, thinking under the keys that the template reads.

    Without such keys (``reasoning_fields`` empty), thinking is put before the content, in ``<think>`` tags.
    """
    shown = dict(message)
    if "tool_calls" in shown:
        shown["tool_calls"] = [_tool_call(call) for call in _list_of("tool_calls", shown["tool_calls"])]
    reasoning = shown.get("reasoning_content")
    if reasoning and not reasoning_fields:
        shown["content"] = f"<think>\n{reasoning}\n</think>\n\n{shown['content']}"
    elif reasoning:
        shown |= dict.fromkeys(reasoning_fields, reasoning)
    return shown


def tools_of(trajectory: Mapping[str, Any]) -> list[Dict] | None:
    """Return the tools of a trajectory, given as a list or as JSON text, which lets a table hold tools of any shape."""
    tools = trajectory.get("tools")
    return _list_of("tools", tools) if tools else None


def key_rounds(trajectory: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the numbers of the only messages to learn from, if ``user_data`` names some; else None."""
    rounds = user_data_get(trajectory.get("user_data"), "key_rounds")
    if not rounds:
        return None
    messages: Sequence[Mapping[str, Any]] = trajectory["messages"]
    assistants = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(rounds, list) or not set(rounds) <= set(assistants):
        raise InvalidInputError("key_rounds", rounds, f"a list of numbers of assistant messages, of {assistants}")
    return frozenset(rounds)


def nested_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that hold trajectories, if the rows are not trajectories themselves."""
    if not rows or rows[0].get("messages") is not None:
        return []
    return [name for name, value in rows[0].items() if isinstance(value, Mapping) and value.get("messages")]


def only_text(trajectory: Mapping[str, Any]) -> str:
    """Return the text of a trajectory that is one user message."""
    messages = trajectory["messages"]
    if len(messages) != 1 or messages[0]["role"] != "user":
        roles = [message["role"] for message in messages]
        raise InvalidInputError("messages", roles, "exactly one user message, with use_chat_template=False")
    return str(messages[0]["content"])


def _tool_call(call: object) -> Dict:
    if not isinstance(call, Mapping):
        raise InvalidInputError("tool_calls", call, "objects with a 'function'")
    shown = {key: value for key, value in call.items() if value is not None}
    function = shown.get("function")
    if isinstance(function, Mapping):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed("arguments", arguments) if arguments.strip() else {}
        shown["function"] = {**function, "arguments": {} if arguments is None else arguments}
    return shown


def _list_of(field: str, value: object) -> list[Any]:
    items = _parsed(field, value) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise InvalidInputError(field, value, "a list, or the JSON text of one")
    return list(items)


def _parsed(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(field, text, "valid JSON") from error


def _block_text(block: object) -> str:
    if not isinstance(block, Mapping):
        raise InvalidInputError("content", block, "blocks {'type': 'text', 'text': …}")
    kind = block.get("type")
    if kind != "text":
        raise _no_media(str(kind))
    return str(block.get("text") or "")


def _no_media(kind: str) -> UnsupportedError:
    return UnsupportedError(f"messages: {kind} cannot be encoded; allowed: text, which is all that this model reads")
