"""Tells apart what a reply in harmony's form, that of gpt-oss, says to the user and what the model thinks.

A reply is one or more messages: ``<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final
<|message|>answer<|return|>``. The prompt ends with ``<|start|>assistant``, so the first header begins with its channel.
"""

from dataclasses import dataclass
from typing import Literal

from twinkle.server.backends.text_codec import TextCodec

_THOUGHTS = "analysis"  # the channel of the model's thoughts; what is in other channels is for the user


@dataclass(frozen=True)
class ChannelTokens:
    """The special tokens of the form. ``ends``: those that end a message."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]


def channel_tokens(codec: TextCodec) -> ChannelTokens | None:
    """Return the tokens of the form; None if the model has another one."""
    start, channel, message, *ends = (
        codec.special_token(f"<|{name}|>") for name in ("start", "channel", "message", "end", "return", "call")
    )
    known = frozenset(token for token in ends if token is not None)
    if start is None or channel is None or message is None or len(known) < len(ends):
        return None
    return ChannelTokens(start, channel, message, known)


class ChannelFilter:
    """Takes the tokens of one reply. A reply that does not begin with a header is one message to the user."""

    def __init__(self, codec: TextCodec, tokens: ChannelTokens) -> None:
        self._codec = codec
        self._tokens = tokens
        self._begun = False
        self._header: list[int] | None = []  # the tokens of the header so far; None: inside a message
        self._thinks = False

    def push(self, token: int) -> Literal["text", "thought", "mark"]:
        """Return what the next token belongs to; "mark": to the form itself, which nobody is shown."""
        begins, self._begun = not self._begun, True
        known = self._tokens
        if token == known.start or token in known.ends:
            self._header = []
            return "mark"
        if begins and token not in (known.channel, known.message):
            self._header = None
        if self._header is None:
            return "thought" if self._thinks else "text"
        if token == known.message:
            self._thinks, self._header = self._channel(self._header) == _THOUGHTS, None
        else:
            self._header.append(token)
        return "mark"

    def _channel(self, header: list[int]) -> str:
        _, _, name = "".join(map(self._codec.token_text, header)).partition(
            self._codec.token_text(self._tokens.channel)
        )
        return name.split()[0] if name.split() else ""
