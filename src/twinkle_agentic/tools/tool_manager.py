"""The manager of tools: it runs the tools that a model calls, and reports errors to the model as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import Tool as ToolInfo
from twinkle.utils.logger import get_logger
from twinkle_agentic.tools.tool import Tool, tool_name

__all__ = ["ToolManager"]

Tools = Mapping[str, Tool] | Sequence[Tool]


class ToolManager:
    """Tools by name. ``tools``: a list of tools, named by their ``tool_info``, or a mapping of names to tools."""

    def __init__(self, tools: Tools | None = None) -> None:
        self._tools: dict[str, Tool] = {}
        if isinstance(tools, Mapping):
            for name, tool in tools.items():
                self._add(name, tool)
        elif isinstance(tools, Sequence):
            for tool in tools:
                self.register(tool)
        elif tools is not None:
            raise TypeError(f"tools: got a {type(tools).__name__}, allowed: a list of tools, or a mapping")

    def register(self, tool: Tool) -> None:
        """Add a tool; it replaces a tool of the same name."""
        _require_tool(tool)
        self._add(tool_name(tool), tool)

    def unregister(self, name: str) -> None:
        """Remove a tool; unknown names are ignored."""
        self._tools.pop(name, None)

    def names(self) -> list[str]:
        return list(self._tools)

    def copy(self) -> "ToolManager":
        """Return another manager with the same tools."""
        return ToolManager(self._tools)

    def tool_infos(self) -> list[ToolInfo]:
        """Return the descriptions of all tools, for the key ``tools`` of a trajectory."""
        return [tool.tool_info() for tool in self._tools.values()]

    def __call__(self, tool_call: Mapping[str, Any]) -> str:
        """Run a tool call and return the tool's answer, or a text for the model that begins with ``Error:``."""
        function: Mapping[str, Any] = tool_call.get("function") or {}
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        if name not in self._tools:
            return f"Error: unknown tool {name!r}; known: {', '.join(self._tools) or 'none'}"
        try:
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except json.JSONDecodeError as error:
            return f"Error: the arguments of {name!r} are not JSON: {error}"
        if not isinstance(arguments, Mapping):
            return f"Error: the arguments of {name!r} are a {type(arguments).__name__}, not a mapping"
        try:
            return str(self._tools[name](name, arguments))
        except Exception as error:  # noqa: BLE001 - tools may raise anything; the model gets the error
            get_logger().debug("tool %r failed", name, exc_info=True)
            return f"Error: {type(error).__name__}: {error}"

    call = __call__

    def _add(self, name: str, tool: Tool) -> None:
        _require_tool(tool)
        if not name:
            raise ValueError(f"tool: {type(tool).__name__} has no name in its tool_info()")
        self._tools[name] = tool


def _require_tool(tool: object) -> None:
    if not isinstance(tool, Tool):
        raise TypeError(f"tool: got a {type(tool).__name__}, allowed: a Tool of twinkle_agentic.tools")
