"""Tools, which a model can call, and the manager that runs them. They import ``data_format``."""

from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.extract_condensed import ExtractCondensed
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["ExtractCondensed", "Tool", "ToolManager"]
