"""Finding tags in text that a model wrote, in time that grows with the length of the text and no faster.

A regular expression such as ``<a>(.*?)</a>`` looks through all the rest of a text for every opening tag that is never
closed. The functions here look for a closing tag once: where there is none, there is none further on either.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Found", "between", "tagged", "without"]


@dataclass(frozen=True)
class Found:
    """Characters ``start`` to ``end`` of a text, the tags included; ``name`` and ``body`` are what they hold."""

    start: int
    end: int
    name: str
    body: str


def between(text: str, opening: str, closing: str) -> Iterator[Found]:
    """Yield what stands between an opening and the next closing mark, as ``opening(.*?)closing`` finds it."""
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        position = end + len(closing)
        yield Found(start, position, "", text[start + len(opening) : end])


def tagged(text: str, name: str) -> Iterator[Found]:
    """Yield what stands between ``<x>`` and the next ``</x>``, as ``<(name)>(.*?)</\\1>`` finds it.

    ``name``: a pattern that matches neither ``<`` nor ``>``.
    """
    closings: defaultdict[str, list[int]] = defaultdict(list)
    for closing in re.finditer(f"</({name})>", text):
        closings[closing[1]].append(closing.start())
    position = 0
    for opening in re.finditer(f"<({name})>", text):
        if opening.start() < position:  # inside of the last one
            continue
        ends = closings.get(opening[1], [])
        next_end = bisect_left(ends, opening.end())
        if next_end < len(ends):
            position = ends[next_end] + len(opening[1]) + len("</>")
            yield Found(opening.start(), position, opening[1], text[opening.end() : ends[next_end]])


def without(text: str, found: list[Found]) -> str:
    """Return the text without the parts that were found, which are in order."""
    starts = [0, *(part.end for part in found)]
    ends = [*(part.start for part in found), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))
