"""What the client gets: whole answers, and the same in chunks. JSON has no infinity: such numbers are −9999."""

import hashlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.protocols.openai.choices import Delta, TokenLogprob, ToolCall

Json = dict[str, object]
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer share. ``weights`` names what was sampled from: other weights, other fingerprint."""

    model: str
    weights: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: Sequence[Json], usage: Usage | None) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "fp_" + hashlib.blake2b(self.weights.encode(), digest_size=6).hexdigest(),
            "choices": choices,
            "usage": None if usage is None else usage.body,
        }


class Format(Protocol):
    """How one of the two protocols writes its answers."""

    @property
    def id(self) -> str: ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json: ...

    def opening(self, index: int) -> Json | None:
        """The chunk that begins a choice, if there is one."""
        ...

    def chunk(self, index: int, delta: Delta) -> Json: ...

    def usage(self, usage: Usage) -> Json: ...


class ChatFormat:
    """``logprobs``: whether the client wants them."""

    def __init__(self, model: str, weights: str, codec: TextCodec, *, logprobs: bool) -> None:
        self._head = Head(model, weights, f"chatcmpl-{secrets.token_hex(12)}")
        self._codec = codec
        self._logprobs = logprobs
        self._calls: dict[int, int] = {}  # how many of each choice were sent

    @property
    def id(self) -> str:
        return self._head.id

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        bodies = [
            self._choice(index, {"message": _message(delta)}, delta.tokens, delta.finish_reason)
            for index, delta in enumerate(choices)
        ]
        return self._head.body("chat.completion", bodies, usage)

    def opening(self, index: int) -> Json:
        return self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}, (), None))

    def chunk(self, index: int, delta: Delta) -> Json:
        content: Json = {"content": delta.text} if delta.text else {}
        if delta.calls:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(delta.calls)
            content["tool_calls"] = [{"index": first + n, **_call(call)} for n, call in enumerate(delta.calls)]
        return self._chunk(self._choice(index, {"delta": content}, delta.tokens, delta.finish_reason))

    def usage(self, usage: Usage) -> Json:
        return self._head.body("chat.completion.chunk", [], usage)

    def _chunk(self, choice: Json) -> Json:
        return self._head.body("chat.completion.chunk", [choice], None)

    def _choice(self, index: int, said: Json, tokens: Sequence[TokenLogprob], reason: str | None) -> Json:
        logprobs = {"content": [self._token(token) for token in tokens], "refusal": None} if self._logprobs else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _token(self, token: TokenLogprob) -> Json:
        return {
            **self._named(token.token, token.logprob),
            "top_logprobs": [self._named(each, logprob) for each, logprob in token.top],
        }

    def _named(self, token: int, logprob: float) -> Json:
        text = self._codec.token_text(token)
        whole = "\ufffd" not in text  # a part of a character has no text, and its bytes are the tokenizer's secret
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


class CompletionFormat:
    """``logprobs``: whether the client wants them."""

    def __init__(self, model: str, weights: str, codec: TextCodec, *, logprobs: bool) -> None:
        self._head = Head(model, weights, f"cmpl-{secrets.token_hex(12)}")
        self._codec = codec
        self._logprobs = logprobs

    @property
    def id(self) -> str:
        return self._head.id

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        bodies = [self._choice(index, delta) for index, delta in enumerate(choices)]
        return self._head.body("text_completion", bodies, usage)

    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, delta: Delta) -> Json:
        return self._head.body("text_completion", [self._choice(index, delta)], None)

    def usage(self, usage: Usage) -> Json:
        return self._head.body("text_completion", [], usage)

    def _choice(self, index: int, delta: Delta) -> Json:
        logprobs = self._table(delta.tokens) if self._logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _table(self, tokens: Sequence[TokenLogprob]) -> Json:
        """Tokens that are parts of characters may read alike: of those the likeliest is listed."""
        text = self._codec.token_text
        tops: list[Mapping[str, float]] = [
            {text(each): _finite(logprob) for each, logprob in reversed(token.top)} for token in tokens
        ]
        return {
            "tokens": [text(token.token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens],
        }


def _message(delta: Delta) -> Json:
    message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.calls:
        message |= {"content": delta.text or None, "tool_calls": [_call(call) for call in delta.calls]}
    return message


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
