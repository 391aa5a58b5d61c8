"""Calls of tools in what a model writes: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen)."""

import json
import secrets
from dataclasses import dataclass, field

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text, as this protocol has it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolCallFilter:
    """Takes calls out of text that comes in pieces. What is no readable call stays text; blanks around calls go."""

    def __init__(self) -> None:
        self._held = ""
        self._blanks = ""
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are complete now."""
        self._held += text
        passed, calls = "", []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                keep = len(self._held) - _beginning_of(_OPEN, self._held)
                passed += self._spaced(self._held[:keep])
                self._held = self._held[keep:]
                break
            passed += self._spaced(self._held[:start])
            self._held = self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                break
            call = _call(self._held[len(_OPEN) : end])
            whole, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            if call is None:
                passed += self._spaced(whole)
            else:
                calls.append(call)
                self._blanks = ""
        self.calls += len(calls)
        return passed, calls

    def close(self) -> str:
        """A call without an end is text; blanks after the last call are nothing."""
        rest = self._spaced(self._held)
        self._held = ""
        return rest if self.calls else rest + self._blanks

    def _spaced(self, text: str) -> str:
        """Text without its last blanks, which wait: a call may follow them."""
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        return kept


def _call(text: str) -> ToolCall | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(content["name"], json.dumps(arguments, ensure_ascii=False))


def _beginning_of(mark: str, text: str) -> int:
    """How many characters at the end of ``text`` may grow into ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
