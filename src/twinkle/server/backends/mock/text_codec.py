"""The mock's tokenizer: the text of tokens 5, 6 is ``"5 6 "``, and a word that is no number is some token too."""

import json
from collections.abc import Mapping, Sequence
from zlib import crc32


class MockTextCodec:
    """A :class:`~twinkle.server.backends.text_codec.TextCodec`."""

    def __init__(self, vocab_size: int, end_token: int) -> None:
        self._vocab_size = vocab_size
        self._end_token = end_token

    def encode(self, text: str) -> list[int]:
        return [int(word) if word.isdecimal() else crc32(word.encode()) % self._vocab_size for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.token_text(token) for token in tokens if token != self._end_token)

    def token_text(self, token: int) -> str:
        return f"{token} "

    def encode_chat(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[int]:
        parts = [json.dumps(tool) for tool in tools] + [
            f"{message['role']} {message['content']}" for message in messages
        ]
        return self.encode(" ".join([*parts, "assistant"]))
