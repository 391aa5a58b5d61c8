"""What the steps share: both forms of rows, texts of messages, thoughts, agent rows, and moving files aside."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.data_format import pack_value
from twinkle.data_format.columns import columns_to_rows
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.utils.logger import get_logger
from twinkle_agentic.data_format.thinking import split_thinking

__all__ = [
    "ROLES",
    "Message",
    "Result",
    "Row",
    "Rows",
    "append_to_text",
    "check_roles",
    "cjk_count",
    "drop_rows",
    "has_media",
    "has_valid_messages",
    "is_agent_row",
    "is_mostly_cjk",
    "joined_text",
    "messages_of",
    "move_aside",
    "reasoning_of",
    "rewrite_rows",
    "rewrite_texts",
    "text_of",
    "thoughts_and_answer",
    "tool_calls_of",
    "with_user_data",
]

Row = dict[str, Any]
Rows = Sequence[Row] | Mapping[str, Sequence[Any]]
Result = tuple[list[Row], list[Row]]  # kept, dropped
Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")


# --- rows -------------------------------------------------------------------------------------------------------------


def drop_rows(rows: Rows, reason_of: Callable[[Row], str | None]) -> Result:
    """Return (kept, dropped). A row is dropped if ``reason_of`` returns a reason, which is put under ``drop_reason``.

    The rows given are not changed: a dropped row is a copy.
    """
    kept: list[Row] = []
    dropped: list[Row] = []
    for row in columns_to_rows(rows):
        reason = reason_of(row)
        if reason is None:
            kept.append(row)
        else:
            dropped.append({**row, "drop_reason": reason})
    return kept, dropped


def rewrite_rows(rows: Rows, rewrite: Callable[[Row], Row]) -> Result:
    """Return (rewritten, []): every row is kept, as ``rewrite`` returns it."""
    return [rewrite(row) for row in columns_to_rows(rows)], []


def rewrite_texts(row: Row, roles: Sequence[str], rewrite: Callable[[str], str]) -> Row:
    """Return a copy of the row in which the texts of all messages of these roles are rewritten.

    In a content list, each text part is rewritten alone; ``reasoning_content`` counts as text of its message.
    """
    messages = row.get("messages")
    if not isinstance(messages, list | tuple):
        return row
    changed = [
        _with_texts(message, rewrite) if isinstance(message, Mapping) and message.get("role") in roles else message
        for message in messages
    ]
    return {**row, "messages": changed}


def _with_texts(message: Mapping[str, Any], rewrite: Callable[[str], str]) -> Message:
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        changed["content"] = rewrite(content)
    elif isinstance(content, list | tuple):
        changed["content"] = [
            {**part, "text": rewrite(part["text"])} if _is_text_part(part) else part for part in content
        ]
    if isinstance(message.get("reasoning_content"), str):
        changed["reasoning_content"] = rewrite(message["reasoning_content"])
    return changed


def with_user_data(row: Row, **values: object) -> Row:
    """Return a copy of the row with these values in ``user_data``; pairs that have one of the keys are replaced."""
    pairs = row.get("user_data") or []
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise InvalidInputError("user_data", pairs, "a list of pairs (key, JSON text)")
    kept = [(key, value) for key, value in pairs if key not in values]
    return {**row, "user_data": [*kept, *((key, pack_value(value)) for key, value in values.items())]}


def check_roles(field: str, roles: Sequence[str]) -> tuple[str, ...]:
    for role in roles:
        if role not in ROLES:
            raise UnknownNameError(field, str(role), ROLES)
    return tuple(roles)


# --- messages ---------------------------------------------------------------------------------------------------------


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row, [] without a list of them. An entry that is no message becomes an empty one."""
    messages = row.get("messages")
    if not isinstance(messages, list | tuple):
        return []
    return [message if isinstance(message, dict) else {} for message in messages]


def has_valid_messages(row: Mapping[str, Any]) -> bool:
    """Return whether the row has at least one message, and each is a dict with a known role and readable content."""
    messages = row.get("messages")
    return isinstance(messages, list | tuple) and bool(messages) and all(_is_message(each) for each in messages)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return False
    content = message.get("content")
    if isinstance(content, list | tuple):
        return all(isinstance(part, str | dict) for part in content)
    return content is None or isinstance(content, str)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or the text parts of a content list, joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return ""
    return "".join(part if isinstance(part, str) else part["text"] for part in content if _has_text(part))


def joined_text(row: Mapping[str, Any], role: str) -> str:
    """Return the texts of all messages of a role, one after another, each from a new line."""
    texts = (text_of(message) for message in messages_of(row) if message.get("role") == role)
    return "\n".join(text for text in texts if text)


def append_to_text(message: Message, text: str) -> Message:
    """Return the message with more text at its end, after a blank line. A content list gets one more part."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}


def has_media(message: Mapping[str, Any]) -> bool:
    if any(message.get(key) for key in ("images", "videos", "audios")):
        return True
    content = message.get("content")
    return isinstance(content, list | tuple) and any(not _has_text(part) for part in content)


def tool_calls_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls of a message, given as a list or as JSON text."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except json.JSONDecodeError:
            return [calls] if calls else []
    return list(calls) if isinstance(calls, list | tuple) else [calls] if calls else []


def is_agent_row(row: Mapping[str, Any]) -> bool:
    """Return whether the conversation has tool messages or tool calls."""
    return any(message.get("role") == "tool" or tool_calls_of(message) for message in messages_of(row))


def _has_text(part: object) -> bool:
    return isinstance(part, str) or _is_text_part(part)


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


# --- thinking and scripts ---------------------------------------------------------------------------------------------


def thoughts_and_answer(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the thoughts of an assistant's message and the text without them.

    Thoughts are ``reasoning_content`` and the ``<think>`` blocks of the text.
    """
    thoughts, answer = split_thinking(text_of(message))
    return reasoning_of(message) + thoughts, answer


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return ``reasoning_content``, "" without one. A table fills it with None in messages of other roles."""
    reasoning = message.get("reasoning_content")
    return reasoning if isinstance(reasoning, str) else ""


def cjk_count(text: str) -> int:
    return sum(1 for _ in _CJK.finditer(text))


def is_mostly_cjk(text: str) -> bool:
    """Return whether at least half of the characters, without spaces, are Chinese, Japanese or Korean."""
    length = sum(1 for character in text if not character.isspace())
    return length > 0 and 2 * cjk_count(text) >= length


# --- files ------------------------------------------------------------------------------------------------------------


def move_aside(path: Path) -> None:
    """Rename a file or folder that exists to the same name with the next free number: ``log.jsonl.1``, ``.2`` …"""
    if not path.exists():
        return
    number = 1
    while (older := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(older)
    get_logger().warning(f"{path} exists already: moved to {older}")
