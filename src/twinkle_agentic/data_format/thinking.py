"""The ``<think>`` blocks in which models write their thoughts before an answer."""

from collections.abc import Iterator

__all__ = ["split_thinking"]

_OPEN, _CLOSE = "<think>", "</think>"


def split_thinking(text: str) -> tuple[str, str]:
    """Return what is inside the ``<think>`` blocks of a text, and what is outside.

    A block without an end reaches to the end of the text. A text that closes a block before it opens one begins
    inside it: some chat templates write the opening tag into the prompt.
    """
    thoughts: list[str] = []
    answer: list[str] = []
    for inside, piece in _pieces(text):
        (thoughts if inside else answer).append(piece)
    return "".join(thoughts), "".join(answer).strip()


def _pieces(text: str) -> Iterator[tuple[bool, str]]:
    first_open, first_close = text.find(_OPEN), text.find(_CLOSE)
    inside = first_close >= 0 and (first_open < 0 or first_close < first_open)
    place = 0
    while place < len(text):
        tag = _CLOSE if inside else _OPEN
        found = text.find(tag, place)
        yield inside, text[place:] if found < 0 else text[place:found]
        if found < 0:
            return
        place, inside = found + len(tag), not inside
