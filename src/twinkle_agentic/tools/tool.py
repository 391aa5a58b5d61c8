"""What a tool is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.data_format import Tool as ToolInfo

__all__ = ["Tool", "tool_name"]


class Tool(ABC):
    """Something that a model can call by name."""

    @abstractmethod
    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        """What the model is told. An exception is told to it as an error."""

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """Its name, what it does and its parameters (a JSON schema), as chat templates list tools."""


def tool_name(tool: Tool) -> str:
    """The name by which a model calls it; "" if it has none."""
    function: Mapping[str, Any] = tool.tool_info().get("function") or {}
    return str(function.get("name") or "")
