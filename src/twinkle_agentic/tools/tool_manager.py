"""The manager of tools: it runs the tools that a model calls, and reports errors to the model as text."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from twinkle.data_format import Tool as ToolInfo
from twinkle.utils.logger import get_logger
from twinkle_agentic.tools.base import Tool, tool_name

__all__ = ["ToolManager"]

Call = Callable[[str, Mapping[str, Any]], Any]


@runtime_checkable
class _Described(Protocol):
    """A tool that describes itself. Scripts may use classes of their own that are no subclasses of Tool."""

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> Any: ...

    def tool_info(self) -> ToolInfo: ...


class ToolManager:
    """Tools by name.

    tools: a list or tuple of tools, which are named by their ``tool_info``, or a dict of names and tools, whose names
    are kept as they are. The values of a dict may be plain functions ``(tool_name, arguments) -> text``; only
    :meth:`tool_infos` needs tools that describe themselves.
    """

    def __init__(self, tools: Mapping[str, Call] | list[Tool] | tuple[Tool, ...] | None = None) -> None:
        self._tools: dict[str, Call] = {}
        if isinstance(tools, Mapping):
            for name, tool in tools.items():
                if not callable(tool):
                    raise TypeError(f"tools: {name!r} is a {type(tool).__name__}, allowed: a tool or a function")
                self._tools[name] = tool
        elif isinstance(tools, list | tuple):
            for tool in tools:
                self.register(tool)
        elif tools is not None:
            raise TypeError(f"tools: got a {type(tools).__name__}, allowed: a list or tuple of tools, or a dict")

    def register(self, tool: Tool) -> None:
        """Add a tool; it replaces a tool of the same name."""
        if isinstance(tool, type):
            raise TypeError(f"tool: got the class {tool.__name__}, allowed: an object of it, {tool.__name__}(…)")
        if not isinstance(tool, _Described):
            raise TypeError(f"tool: got a {type(tool).__name__}, allowed: a Tool of twinkle_agentic.tools")
        name = tool_name(tool.tool_info())
        if not name:
            raise ValueError(f"tool: {type(tool).__name__} has no name in its tool_info()")
        self._tools[name] = tool

    def unregister(self, name: str) -> Call | None:
        """Remove a tool and return it; None if there is none of this name."""
        return self._tools.pop(name, None)

    def names(self) -> list[str]:
        return list(self._tools)

    def copy(self) -> "ToolManager":
        """Return another manager with the same tools."""
        return ToolManager(self._tools)

    def tool_infos(self) -> list[ToolInfo]:
        """Return the descriptions of all tools, for the key ``tools`` of a trajectory."""
        silent = [name for name, tool in self._tools.items() if not isinstance(tool, _Described)]
        if silent:
            raise TypeError(f"tools: {', '.join(silent)} have no tool_info(), allowed: tools that describe themselves")
        return [cast("_Described", tool).tool_info() for tool in self._tools.values()]

    def __call__(self, tool_call: object) -> str:
        """Run a tool call, a dict in OpenAI's format.

        Return the tool's answer, or a text for the model that begins with ``Error:``. It never raises.
        """
        if not isinstance(tool_call, Mapping):
            return f"Error: the tool call is a {type(tool_call).__name__}, not an object"
        function = tool_call.get("function")
        if not isinstance(function, Mapping):
            return 'Error: the tool call has no "function"'
        name = function.get("name")
        if not isinstance(name, str) or not name:
            return 'Error: the tool call has no "function.name"'
        tool = self._tools.get(name) or self._only_tool()
        if tool is None:
            return f"Error: unknown tool {name!r}; available: {', '.join(self._tools) or '(none)'}"
        try:
            arguments = _arguments(function.get("arguments"))
        except (ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deeply
            return f"Error: the arguments of {name!r} are not JSON: {error}"
        if not isinstance(arguments, Mapping):
            return f"Error: the arguments of {name!r} are a {type(arguments).__name__}, not an object"
        try:
            return str(tool(name, arguments))
        except Exception as error:  # noqa: BLE001 - tools may raise anything; the model gets the error
            get_logger().debug("tool %r failed", name, exc_info=True)
            return f"Error: tool {name!r} raised {type(error).__name__}{_reason(error)}"

    call = __call__

    def _only_tool(self) -> Call | None:
        """Return the only tool if it answers calls of any name, else None."""
        tools = list(self._tools.values())
        return tools[0] if len(tools) == 1 and isinstance(tools[0], Tool) and tools[0].answers_any_name else None


def _reason(error: Exception) -> str:
    """Return an error's text after a colon; nothing if making that text fails too."""
    try:
        return f": {error}"
    except Exception:  # noqa: BLE001 - the __str__ of a tool's own error
        return ""


def _arguments(given: Any) -> Any:
    """Return the arguments of a call: nothing and blank text are no arguments, other text is JSON."""
    if given is None:
        return {}
    if isinstance(given, str):
        return json.loads(given) if given.strip() else {}
    return given
