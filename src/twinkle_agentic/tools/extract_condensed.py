"""The tool with which a model reads the original text of a block that was condensed."""

from collections.abc import Iterable, Mapping
from typing import Any

from twinkle.data_format import Tool as ToolInfo
from twinkle_agentic.data_format import Chunk, condensed_blocks
from twinkle_agentic.tools.base import Tool

__all__ = ["TOOL_NAME", "ExtractCondensed"]

TOOL_NAME = "extract_condensed"


class ExtractCondensed(Tool):
    """A tool that gives back the text behind ``<block_N>``, once for each block.

    chunks: the condensed chunks of one conversation. A model asks with the argument ``blocks`` (or ``block``), the
    number of one block. Everything else is answered with a text that begins with ``Error:``.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        found = condensed_blocks(chunks)
        self._numbers = list(found)
        self._originals = {n: (chunk.get("raw") or {}).get("original") for n, chunk in found.items()}
        self._given: set[int] = set()

    @property
    def blocks(self) -> dict[int, str]:
        """Return the original texts by the number of their block; blocks without a stored original are left out."""
        return {n: text for n, text in self._originals.items() if isinstance(text, str)}

    def __call__(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        given = arguments.get("blocks", arguments.get("block"))
        number = _number(given)
        if number is None:
            return f"Error: blocks is {given!r}; allowed: the number of one block, such as 1"
        if number not in self._originals:
            known = ", ".join(map(str, self._numbers)) or "(none)"
            return f"Error: there is no block {number}; available: {known}"
        text = self._originals[number]
        if not isinstance(text, str):
            return f"Error: the original of block {number} was not stored"
        if number in self._given:
            return f"Error: block {number} was extracted before; its text is in an earlier answer"
        self._given.add(number)
        return text

    def tool_info(self) -> ToolInfo:
        number = {"type": "integer", "description": "The number N of one <block_N>."}
        return {
            "type": "function",
            "function": {
                "name": TOOL_NAME,
                "description": "Return the full original text of a condensed <block_N>. Each block can be read once.",
                "parameters": {"type": "object", "properties": {"blocks": number}, "required": ["blocks"]},
            },
        }


def _number(given: object) -> int | None:
    """Return an integer or a text of digits as a number; None for anything else, also for true and false."""
    if isinstance(given, bool):
        return None
    if isinstance(given, int):
        return given
    if isinstance(given, str) and given.strip().isascii() and given.strip().isdigit() and len(given.strip()) < 10:
        return int(given)
    return None
