"""Parsers for tool calls in an assistant's text, one for each format that models write."""

from twinkle.template.tools.cline import ClineParser
from twinkle.template.tools.hermes_qwen import HermesQwenParser
from twinkle.template.tools.parser import ToolCallParser
from twinkle.template.tools.react import ReActParser
from twinkle.template.tools.registry import ToolCallRegistry
from twinkle.template.tools.vcp import VCPParser

__all__ = ["ClineParser", "HermesQwenParser", "ReActParser", "ToolCallParser", "ToolCallRegistry", "VCPParser"]
