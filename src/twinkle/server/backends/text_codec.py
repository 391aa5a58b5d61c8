"""Convert between text and the tokens of a model: its tokenizer, its chat template, and limits on text.

Requests that carry tokens need none of this.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from twinkle.data_format import ToolCall
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.template.labels import IGNORE
from twinkle.template.media import images_of
from twinkle.template.template import Template

# A chat template does not declare its inputs; one that supports tools mentions the variable ``tools``.
_READS_TOOLS = re.compile(r"\btools\b")


class TextCodec(Protocol):
    """Turns text into the tokens of one model, and back. Used in several threads at once."""

    def encode(self, text: str) -> list[int]:
        """Encode a text without a chat template, with the special tokens that this tokenizer adds to every text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; incomplete characters are U+FFFD."""

    def token_text(self, token: int) -> str:
        """Return the text of one token, special or not."""

    def special_token(self, text: str) -> int | None:
        """Return the special token with this text; None if there is none."""

    def encode_chat(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """Encode a conversation up to where the assistant's next turn begins."""


class HubTextCodec:
    """The :class:`TextCodec` of a Hugging Face tokenizer and the chat template that comes with it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text(tokens, special=False)

    def token_text(self, token: int) -> str:
        return self._text([token], special=True)

    def special_token(self, text: str) -> int | None:
        token: int | None = self._tokenizer.get_added_vocab().get(text)
        return token

    def encode_chat(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise UnsupportedError(
                "messages: this model has no chat template; send a prompt to /v1/completions instead"
            )
        given = list(tools) or None
        if given and not _READS_TOOLS.search(self._tokenizer.get_chat_template(tools=given)):
            raise UnsupportedError("tools: the chat template of this model does not know tools")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=given, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise InvalidInputError("messages", error.message, "what the chat template of this model takes") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))  # the template has written them

    def _text(self, tokens: Sequence[int], *, special: bool) -> str:
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))


Row = dict[str, Any]


class CodecTemplate(Template):
    """A template for a model with a codec and without tokenizer files, such as the mock. It has no options.

    Conversations are always encoded up to the assistant's turn, whatever the arguments say: a codec has no other form.
    """

    pre_pipeline_names = ("_build_standard_messages", "_encode_chat")

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._set_options(True, None, "raise", None, True)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if skip_special_tokens:
            return self._codec.decode(token_ids)
        return "".join(self._codec.token_text(token) for token in token_ids)

    def parse_tool_call(self, text: str) -> list[ToolCall]:
        """Return no tool calls: finding them takes a tokenizer, which knows the special tokens."""
        return []

    def _encode_rows(self, trajectories: Sequence[Mapping[str, Any]], *_options: object) -> list[list[Row]]:
        return [self._invoke_post_pipeline(self._invoke_pre_pipeline([dict(each)])) for each in trajectories]

    def _encode_chat(self, trajectory: Row) -> list[Row]:
        tokens = np.array(self._codec.encode_chat(trajectory["messages"], trajectory.get("tools") or []), np.int64)
        return [{**trajectory, "input_ids": tokens, "labels": np.full(len(tokens), IGNORE)}]


_AT_ONCE = 2**20  # characters tokenised at once: a tokenizer takes up to 200 bytes of memory for each
_CHARACTERS_OF_A_TOKEN = 16  # for the limit: far more than the average of any text


def max_characters(context: int) -> int:
    """Return the most characters that one text or conversation may have for a model with this context."""
    return max(_AT_ONCE, _CHARACTERS_OF_A_TOKEN * context)


def check_characters(field: str, characters: int, most: int) -> None:
    if characters > most:
        raise InvalidInputError(field, f"{characters} characters of text", f"at most {most}")


def text_groups(rows: Sequence[Mapping[str, Any]], most: int) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in groups that are tokenised at once: of at most 2**20 characters, or of one larger row.

    InvalidInputError: a row has more than ``most`` characters.
    """
    group: list[Mapping[str, Any]] = []
    size = 0
    for index, row in enumerate(rows):
        characters = _characters(row) - _image_characters(row)
        check_characters(f"inputs[{index}]", characters, most)
        if group and size + characters > _AT_ONCE:
            yield group
            group, size = [], 0
        group.append(row)
        size += characters
    if group:
        yield group


def _image_characters(row: Mapping[str, Any]) -> int:
    """Return how many of a conversation's characters are image files as base64, which is not text."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return 0
    return sum(map(_characters, images_of(row)))


def _characters(value: object) -> int:
    """Return the number of characters of text in a JSON value, including the keys of objects."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _characters(each) for key, each in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
