"""Replies that are no language: broken characters, control tokens, mixed scripts, one character again and again."""

import re
import unicodedata
from itertools import pairwise

from twinkle_agentic.preprocessor.utils import Result, Row, Rows, drop_rows, messages_of, reasoning_of, text_of

__all__ = ["TokenSoupFilter"]

_SPECIAL_TOKEN = re.compile(r"<\|[\w▁ .\-]{1,40}\|>|<(?:unk|pad|s|/s|bos|eos|mask)>|\[(?:UNK|PAD|CLS|SEP|MASK)\]")
# Spaces indent code, and these characters draw lines and tables: a long run of them is no soup.
_RUN = re.compile(r"([^\s\-=_*#~.+|─━═│·])\1{19}")
_ORDINARY_CONTROLS = "\t\n\r\f\v"
_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "THAI", "HANGUL", "ARMENIAN", "GEORGIAN")
# Chinese and Japanese texts mix these characters.
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC")


class TokenSoupFilter:
    """Drops rows in which a message of the assistant is not language (``token_soup``).

    replacement_char_ratio, control_char_ratio, private_use_ratio: largest shares of U+FFFD, of control characters
    (tab and line ends do not count) and of characters for private use. special_token_count: this many tokens such as
    ``<|im_end|>`` or ``[PAD]`` are too many. script_chaos_threshold: largest share of neighbouring letters that belong
    to different scripts, in texts of at least ``script_chaos_min_chars`` letters. max_chars: how many characters of a
    message are read, 0 for all. One character 20 times in a row is soup too, unless it is a space or draws lines.
    """

    def __init__(
        self,
        replacement_char_ratio: float = 0.02,
        control_char_ratio: float = 0.01,
        private_use_ratio: float = 0.03,
        special_token_count: int = 20,
        script_chaos_threshold: float = 0.55,
        script_chaos_min_chars: int = 40,
        max_chars: int = 0,
    ) -> None:
        self.replacement_char_ratio = replacement_char_ratio
        self.control_char_ratio = control_char_ratio
        self.private_use_ratio = private_use_ratio
        self.special_token_count = special_token_count
        self.script_chaos_threshold = script_chaos_threshold
        self.script_chaos_min_chars = script_chaos_min_chars
        self.max_chars = max_chars

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        for message in messages_of(row):
            if message.get("role") != "assistant":
                continue
            text = text_of(message) + reasoning_of(message)
            if self._is_soup(text[: self.max_chars] if self.max_chars else text):
                return "token_soup"
        return None

    def _is_soup(self, text: str) -> bool:
        if not text:
            return False
        categories = [unicodedata.category(character) for character in text]
        controls = sum(
            1
            for character, category in zip(text, categories, strict=True)
            if category == "Cc" and character not in _ORDINARY_CONTROLS
        )
        length = len(text)
        return (
            text.count("\ufffd") / length > self.replacement_char_ratio
            or controls / length > self.control_char_ratio
            or categories.count("Co") / length > self.private_use_ratio
            or sum(1 for _ in _SPECIAL_TOKEN.finditer(text)) >= self.special_token_count
            or _RUN.search(text) is not None
            or self._mixes_scripts(text)
        )

    def _mixes_scripts(self, text: str) -> bool:
        """Return whether too many neighbouring letters are of different scripts; other characters are left out."""
        scripts = [_script(character) for character in text if character.isalpha()]
        if len(scripts) < max(self.script_chaos_min_chars, 2):
            return False
        changes = sum(1 for left, right in pairwise(scripts) if left != right)
        return changes / (len(scripts) - 1) > self.script_chaos_threshold


def _script(letter: str) -> str:
    """Return the script of a letter, by its Unicode name. Chinese and Japanese characters count as one script."""
    if letter.isascii():
        return "LATIN"
    name = unicodedata.name(letter, "")
    if name.startswith(_EAST_ASIAN):
        return "CJK"
    return next((script for script in _SCRIPTS if name.startswith(script)), name.partition(" ")[0])
