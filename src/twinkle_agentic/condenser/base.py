"""The interface of condensers, and which chunks they may replace."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, overload

from twinkle.errors import InvalidInputError
from twinkle_agentic.data_format import Chunk, Chunks, RawChunk

__all__ = ["SKIPPED_ROLES", "Condenser", "condensed", "may_condense", "require_ratio"]

SKIPPED_ROLES = ("system", "tool", "assistant")


class Condenser(ABC):
    """Replaces chunks by shorter ones. The original text stays in the chunk's ``raw``, under ``original``."""

    @overload
    def __call__(self, chunks: Chunks, **options: Any) -> Chunks: ...

    @overload
    def __call__(self, chunks: Sequence[Chunks], **options: Any) -> list[Chunks]: ...

    def __call__(self, chunks: Chunks | Sequence[Chunks], **options: Any) -> Chunks | list[Chunks]:
        """Return the conversation with condensed chunks, or several conversations in one call.

        The chunks that are given are not changed. ``options``: those of the class's ``condense``.
        """
        if isinstance(chunks, Chunks):
            return self.condense([chunks], **options)[0]
        return self.condense(list(chunks), **options)

    @abstractmethod
    def condense(self, conversations: list[Chunks]) -> list[Chunks]:
        """Return each conversation with condensed chunks, in order."""


def may_condense(
    chunk: Chunk,
    min_chars: int,
    skip_roles: Collection[str],
    rounds: Collection[int] | None,
    skip_pattern: re.Pattern[str] | None = None,
) -> bool:
    """Return whether a chunk is a text that may be replaced: long enough, of these rounds, not condensed already."""
    raw = chunk.get("raw") or {}
    return (
        chunk.get("type", "text") == "text"
        and not raw.get("condensed")
        and raw.get("kind") != "tool_call"
        and chunk.get("role") not in skip_roles
        and (rounds is None or chunk.get("round") in rounds)
        and len(chunk["content"]) >= min_chars
        and (skip_pattern is None or skip_pattern.search(chunk["content"]) is None)
    )


def condensed(chunk: Chunk, text: str) -> Chunk:
    """Return the chunk with a condenser's text."""
    raw: RawChunk = {**(chunk.get("raw") or {}), "condensed": True, "original": chunk["content"]}
    return {**chunk, "content": text, "raw": raw}


def require_ratio(compression_ratio: float) -> float:
    """Return the ratio. Raise InvalidInputError if a text of that share would not be shorter."""
    if not compression_ratio > 1:
        raise InvalidInputError("compression_ratio", compression_ratio, "a number > 1")
    return compression_ratio
