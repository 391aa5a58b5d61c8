"""The format of VCPToolBox: ``<<<[TOOL_REQUEST]>>>`` blocks with bracketed values."""

from collections.abc import Callable, Iterator

from twinkle.data_format import ToolCall
from twinkle.template.tools.parser import ToolCallParser, function_call
from twinkle.template.tools.scanning import between, without

__all__ = ["VCPParser"]

# The second pair of brackets is for values that contain the first pair.
_BRACKETS = {"「始」": "「末」", "「始ESCAPE」": "「末ESCAPE」"}
_OPENING = "「始"


class VCPParser(ToolCallParser):
    name = "vcp"
    open_marker = "<<<[TOOL_REQUEST]>>>"
    close_marker = "<<<[END_TOOL_REQUEST]>>>"

    def detect(self, text: str) -> bool:
        return self.open_marker in text

    def parse(self, text: str) -> list[ToolCall]:
        calls = []
        for block in between(text, self.open_marker, self.close_marker):
            fields = {key: value.strip() for key, value in _fields(block.body)}
            name = fields.pop("tool_name", "")
            if name:
                calls.append(function_call(name, fields))
        return calls

    def clean(self, text: str) -> str:
        return without(text, list(between(text, self.open_marker, self.close_marker))).rstrip()


def _fields(block: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of each ``key: 「始」value「末」``. A key is searched backwards from its bracket."""
    position = 0  # the end of the last field
    bracket = block.find(_OPENING)
    without_end: set[str] = set()  # opening brackets without a closing one in the rest of the block
    while bracket >= 0:
        opening = next((mark for mark in _BRACKETS if block.startswith(mark, bracket)), None)
        key = None if opening is None or opening in without_end else _key_before(block, bracket, position)
        if opening is not None and key is not None:
            start = bracket + len(opening)
            end = block.find(_BRACKETS[opening], start)
            if end >= 0:
                yield key, block[start:end]
                position = end + len(_BRACKETS[opening])
            else:
                without_end.add(opening)
        bracket = block.find(_OPENING, max(bracket + 1, position))


def _key_before(block: str, bracket: int, position: int) -> str | None:
    """Return the key in ``key: 「…``, that is the word before the colon before a bracket; None if there is none."""
    end = _back(block, bracket, position, str.isspace)
    if end <= position or block[end - 1] not in ":：":
        return None
    end = _back(block, end - 1, position, str.isspace)
    start = _back(block, end, position, _is_part_of_key)
    return block[start:end] or None


def _back(text: str, end: int, stop: int, passes: Callable[[str], bool]) -> int:
    while end > stop and passes(text[end - 1]):
        end -= 1
    return end


def _is_part_of_key(character: str) -> bool:
    return character.isalnum() or character in "_-"
