"""The interface of tool call parsers."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from twinkle.data_format import ToolCall

__all__ = ["ToolCallParser", "function_call"]


class ToolCallParser(ABC):
    """A parser for one format of tool calls. The markers are None if the format has no fixed ones."""

    name: ClassVar[str]
    open_marker: ClassVar[str | None] = None
    close_marker: ClassVar[str | None] = None

    @abstractmethod
    def detect(self, text: str) -> bool:
        """Return whether the text contains a tool call in this format."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in the text, in order. Malformed calls are omitted."""

    @abstractmethod
    def clean(self, text: str) -> str:
        """Return the text without the calls and without white space at its end."""

    def extract_tool_result(self, text: str) -> str | None:
        """Return the tool result in a message, for formats that define how results are written; else None."""
        return None


def function_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
