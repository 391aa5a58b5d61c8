"""The registry of tool call parsers, in the order in which they are tried."""

from typing import ClassVar

from twinkle.template.tools.cline import ClineParser
from twinkle.template.tools.hermes_qwen import HermesQwenParser
from twinkle.template.tools.parser import ToolCallParser
from twinkle.template.tools.react import ReActParser
from twinkle.template.tools.vcp import VCPParser

__all__ = ["ToolCallRegistry"]


class ToolCallRegistry:
    """All parsers of this process. A parser that a user registers is tried after the built-in ones."""

    _parsers: ClassVar[dict[str, ToolCallParser]] = {
        "hermes_qwen": HermesQwenParser(),
        "cline": ClineParser(),
        "vcp": VCPParser(),
        "react": ReActParser(),
    }

    @classmethod
    def register(cls, parser: ToolCallParser) -> ToolCallParser:
        """Add a parser and return it. If its name is already taken, keep and return the existing parser."""
        return cls._parsers.setdefault(parser.name, parser)

    @classmethod
    def parsers(cls) -> list[ToolCallParser]:
        return list(cls._parsers.values())

    @classmethod
    def detect_first(cls, text: str) -> ToolCallParser | None:
        return next((parser for parser in cls._parsers.values() if parser.detect(text)), None)
