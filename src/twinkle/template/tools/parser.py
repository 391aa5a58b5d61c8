"""What every format of tool calls can do."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from twinkle.data_format import ToolCall

__all__ = ["ToolCallParser", "function_call"]


class ToolCallParser(ABC):
    """One format. The markers are None where the format has none that are always the same."""

    name: ClassVar[str]
    open_marker: ClassVar[str | None] = None
    close_marker: ClassVar[str | None] = None

    @abstractmethod
    def detect(self, text: str) -> bool:
        """Whether the text holds something in this format."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """The calls in the text, in order; what is malformed is left out."""

    @abstractmethod
    def clean(self, text: str) -> str:
        """The text without the calls and without white space at its end."""

    def extract_tool_result(self, text: str) -> str | None:
        """The result in a message that brings one, for formats that give it a form of its own."""
        return None


def function_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
