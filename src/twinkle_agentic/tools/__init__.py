"""Tools, which a model can call."""

from twinkle_agentic.tools.tool import Tool
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["Tool", "ToolManager"]
