"""The interface of a tool."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.data_format import Tool as ToolInfo

__all__ = ["Tool", "tool_name"]


class Tool(ABC):
    """A tool that a model can call by name."""

    # True: this tool alone in a manager gets every call, whatever name the model uses.
    answers_any_name = False

    @abstractmethod
    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        """Run the tool and return the text for the model. The model sees an exception as an error text."""

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """Return the tool's name, description and parameters (a JSON schema), in OpenAI's format."""


def tool_name(info: Mapping[str, Any]) -> str:
    """Return the name in the description of a tool; "" if it has none."""
    function: Mapping[str, Any] = info.get("function") or {}
    return str(function.get("name") or "")
