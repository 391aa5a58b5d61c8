"""Searching for tags in text that a model wrote, in time linear in the length of the text.

A regular expression such as ``<a>(.*?)</a>`` scans the rest of the text for every opening tag that is never closed,
which takes quadratic time. The functions here search for a closing tag once: if there is none after one position, there
is none after a later position either.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Found", "between", "tagged", "without"]


@dataclass(frozen=True)
class Found:
    """A match at characters ``start`` to ``end`` of a text, tags included, with the tag's ``name`` and its content."""

    start: int
    end: int
    name: str
    body: str


def between(text: str, opening: str, closing: str) -> Iterator[Found]:
    """Yield the text between each opening mark and the next closing mark, as ``opening(.*?)closing`` finds it."""
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        position = end + len(closing)
        yield Found(start, position, "", text[start + len(opening) : end])


def tagged(text: str, name: str) -> Iterator[Found]:
    """Yield the text between each ``<x>`` and the next ``</x>``, as ``<(name)>(.*?)</\\1>`` finds it.

    ``name``: a pattern that matches neither ``<`` nor ``>``.
    """
    closings: defaultdict[str, list[int]] = defaultdict(list)
    for closing in re.finditer(f"</({name})>", text):
        closings[closing[1]].append(closing.start())
    position = 0
    for opening in re.finditer(f"<({name})>", text):
        if opening.start() < position:  # inside the previous match
            continue
        ends = closings.get(opening[1], [])
        next_end = bisect_left(ends, opening.end())
        if next_end < len(ends):
            position = ends[next_end] + len(opening[1]) + len("</>")
            yield Found(opening.start(), position, opening[1], text[opening.end() : ends[next_end]])


def without(text: str, found: list[Found]) -> str:
    """Return the text without these matches, which must be in order."""
    starts = [0, *(part.end for part in found)]
    ends = [*(part.start for part in found), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))
