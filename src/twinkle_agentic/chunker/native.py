"""A chunker that cuts a long first question at its paragraphs, lines, sentences, words or characters."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from twinkle.errors import InvalidInputError
from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.data_format import Chunk, Chunks, chunks_of_messages

__all__ = ["NativeChunker"]

# From the coarsest to the finest. "" stands for cuts between any two characters.
_SEPARATORS = ("\n\n", "\n", "。", "！", "？", ". ", "! ", "? ", "；", "; ", "，", ", ", " ", "")
_MEDIA_LISTS = {"images": "image", "videos": "video", "audios": "audio"}


class NativeChunker(Chunker):
    """Cuts the texts of the first user message into chunks of at most ``chunk_size`` characters.

    Everything else becomes one chunk for each text, medium and tool call. The contents of the first user message's
    chunks, joined, are its text.

    separators: where to cut, the coarsest first: a text that is too long is cut behind each occurrence of the first
    one, a piece that is still too long behind each occurrence of the next one, and at last between characters.
    Neighbours are then merged as long as they fit. passage_boundary_re: a regular expression (MULTILINE); each match
    begins a new passage, and pieces of two passages are never merged.
    """

    def __init__(
        self,
        chunk_size: int = 1024,
        separators: Sequence[str] | None = None,
        passage_boundary_re: str | re.Pattern[str] | None = None,
    ) -> None:
        if chunk_size <= 0:
            raise InvalidInputError("chunk_size", chunk_size, "a number of characters ≥ 1")
        if isinstance(separators, str):
            raise InvalidInputError("separators", separators, "a list of texts")
        self.chunk_size = chunk_size
        self.separators = _SEPARATORS if separators is None else tuple(separators)
        self.passage_boundary_re = None if passage_boundary_re is None else _multiline(passage_boundary_re)

    def __call__(self, trajectory: Mapping[str, Any]) -> Chunks:
        chunks: list[Chunk] = []
        for chunk in chunks_of_messages(trajectory.get("messages") or []):
            is_first_question = chunk["role"] == "user" and chunk["round"] == 1
            if is_first_question and chunk["type"] == "text" and chunk["content"]:
                chunks += [{**chunk, "content": piece} for piece in self.split(chunk["content"])]
            else:
                chunks.append(chunk)
        return Chunks([*_own_media(trajectory), *chunks])

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text; joined, they are the text."""
        return [
            piece
            for passage in self._passages(text)
            for piece in _merged(_cut(passage, self.separators, self.chunk_size), self.chunk_size)
        ]

    def _passages(self, text: str) -> Iterator[str]:
        starts = (
            [] if self.passage_boundary_re is None else [m.start() for m in self.passage_boundary_re.finditer(text)]
        )
        cuts = [0, *(start for start in starts if 0 < start < len(text)), len(text)]
        return (text[start:end] for start, end in pairwise(cuts) if start < end)


def _own_media(trajectory: Mapping[str, Any]) -> list[Chunk]:
    """Return chunks of the trajectory's own media. Chunks without ``raw`` go back to its lists."""
    return [
        {"type": medium, "content": value, "role": "user", "round": 0}  # type: ignore[typeddict-item]
        for name, medium in _MEDIA_LISTS.items()
        for value in trajectory.get(name) or []
    ]


def _multiline(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(pattern, re.Pattern):
        return re.compile(pattern.pattern, pattern.flags | re.MULTILINE)
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise InvalidInputError("passage_boundary_re", pattern, f"a regular expression ({error})") from error


def _cut(text: str, separators: Sequence[str], size: int) -> list[str]:
    """Return pieces of at most ``size`` characters, cut at the coarsest separators that make them small enough."""
    if len(text) <= size:
        return [text]
    if not separators or separators[0] == "":
        return _hard_cut(text, size)
    return [piece for part in _split_keep(text, separators[0]) for piece in _cut(part, separators[1:], size)]


def _split_keep(text: str, separator: str) -> list[str]:
    """Return the parts of a text, each with the separator that ends it."""
    parts = text.split(separator)
    return [part for part in (*(f"{part}{separator}" for part in parts[:-1]), parts[-1]) if part]


def _hard_cut(text: str, size: int) -> list[str]:
    """Return pieces of ``size`` characters; the last one may be shorter."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def _merged(pieces: Sequence[str], size: int) -> list[str]:
    """Return the pieces with neighbours joined as long as the result has at most ``size`` characters."""
    merged: list[str] = []
    for piece in pieces:
        if merged and len(merged[-1]) + len(piece) <= size:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
