"""How much text is tokenised at a time: a tokenizer takes up to 200 bytes of memory for each character."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["check_characters", "max_characters", "text_groups"]

_AT_ONCE = 2**20
_CHARACTERS_OF_A_TOKEN = 16  # far more than the average of any text


def max_characters(context: int) -> int:
    """Return the most characters that one text or conversation may have for a model with this context."""
    return max(_AT_ONCE, _CHARACTERS_OF_A_TOKEN * context)


def check_characters(field: str, characters: int, most: int) -> None:
    if characters > most:
        raise InvalidInputError(field, f"{characters} characters of text", f"at most {most}")


def text_groups(rows: Sequence[Mapping[str, Any]], most: int) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in groups that are small enough to be tokenised at once. ``most`` characters one row may have."""
    group: list[Mapping[str, Any]] = []
    size = 0
    for index, row in enumerate(rows):
        characters = _characters(row)
        check_characters(f"inputs[{index}]", characters, most)
        if group and size + characters > _AT_ONCE:
            yield group
            group, size = [], 0
        group.append(row)
        size += characters
    if group:
        yield group


def _characters(value: object) -> int:
    """Return how many characters of text there are in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _characters(each) for key, each in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
