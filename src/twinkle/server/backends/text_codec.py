"""Text in and out of a model: its tokenizer and its chat template. Tenants who send tokens need neither."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from twinkle.errors import InvalidInputError, UnsupportedError

# A chat template says nothing about what it reads; one that knows tools names them.
_READS_TOOLS = re.compile(r"\btools\b")


class TextCodec(Protocol):
    """What the service needs to speak text with one model. Used from several threads at once."""

    def encode(self, text: str) -> list[int]:
        """A text as it stands, with what this tokenizer puts before any text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens are left out, incomplete characters are U+FFFD."""
        ...

    def token_text(self, token: int) -> str:
        """Of one token, special or not."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        """A conversation up to where the assistant's next turn begins."""
        ...


class HubTextCodec:
    """A Hugging Face tokenizer, and the chat template that comes with it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text(tokens, special=False)

    def token_text(self, token: int) -> str:
        return self._text([token], special=True)

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
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)  # the template wrote them
        return tokens

    def _text(self, tokens: Sequence[int], *, special: bool) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text
