"""``<tool_call>`` blocks, as Hermes and Qwen write them: JSON inside, or Qwen-Coder's tags."""

import json
import re
from typing import Any

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call

__all__ = ["HermesQwenParser"]

# A model that was cut off leaves the last block open.
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


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
    if "<function=" in block:
        return [function_call(name, _parameters(body)) for name, body in _FUNCTION.findall(block)]
    try:
        call = json.loads(block)
    except json.JSONDecodeError:
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
    return {key: _json_or_text(value.strip("\n")) for key, value in _PARAMETER.findall(body)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
