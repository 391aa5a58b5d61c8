"""The format of Hermes and Qwen: ``<tool_call>`` blocks with JSON, or with Qwen-Coder's tags."""

import json
import re
from collections.abc import Iterator
from typing import Any

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call

__all__ = ["HermesQwenParser"]

# The last block is open if generation was cut off.
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_OF_FUNCTION = re.compile(r"</function>")
_END_OF_PARAMETER = re.compile(r"</parameter>|(?=<parameter=)")
_END_OF_NAME = re.compile(r"[>\s]")


class HermesQwenParser(ToolCallParser):
    name = "hermes_qwen"
    open_marker = "<tool_call>"
    close_marker = "</tool_call>"

    def detect(self, text: str) -> bool:
        return self.open_marker in text

    def parse(self, text: str) -> list[ToolCall]:
        return [call for block in _BLOCK.findall(text) for call in _calls(block)]

    def clean(self, text: str) -> str:
        return _BLOCK.sub("", text).rstrip()


def _calls(block: str) -> list[ToolCall]:
    if _FUNCTION in block:
        return [function_call(name, _parameters(body)) for name, body in _named(block, _FUNCTION, _END_OF_FUNCTION)]
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):  # not JSON, numbers with thousands of digits, deep nesting
        return []
    if not isinstance(call, dict):
        return []
    name = call.get("name") or call.get("tool_name")
    arguments = _arguments(call.get("arguments"))
    return [function_call(name, arguments)] if isinstance(name, str) and arguments is not None else []


def _arguments(value: object) -> dict[str, Any] | None:
    if value is None or value == "":
        return {}
    parsed = _json_or_text(value) if isinstance(value, str) else value
    return parsed if isinstance(parsed, dict) else None


def _parameters(body: str) -> dict[str, Any]:
    return {key: _json_or_text(value.strip("\n")) for key, value in _named(body, _PARAMETER, _END_OF_PARAMETER)}


def _named(text: str, opening: str, end: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, body) of each ``<opening=name>body``, which ends at ``end`` or with the text.

    A name that does not end with ``>`` is not a tag. The search continues after it, because any tag that begins inside
    the name would end in the same way.
    """
    position = 0
    while (start := text.find(opening, position)) >= 0:
        name = start + len(opening)
        stop = _END_OF_NAME.search(text, name)
        if stop is None:
            return
        if stop[0] != ">" or stop.start() == name:
            position = stop.start()
            continue
        closing = end.search(text, stop.end())
        yield text[name : stop.start()], text[stop.end() : closing.start() if closing else len(text)]
        position = closing.end() if closing else len(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
