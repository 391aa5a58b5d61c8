"""What the client gets: whole answers, and the same in chunks. JSON has no infinity: such numbers are −9999."""

import hashlib
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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


class Format(ABC):
    """How one of the two protocols writes an answer. All chunks of an answer have the same ``id``."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, weights: str, codec: TextCodec, *, logprobs: bool) -> None:
        """``weights`` names what was sampled from: other weights, other fingerprint. ``logprobs``: are they wanted?"""
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = "fp_" + hashlib.blake2b(weights.encode(), digest_size=6).hexdigest()
        self._codec = codec
        self._logprobs = logprobs

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        return self._body(self.whole_kind, [self._choice(*each, whole=True) for each in enumerate(choices)], usage)

    def opening(self, index: int) -> Json | None:
        """Return the chunk that begins a choice, if there is one."""
        return None

    def chunk(self, index: int, delta: Delta) -> Json:
        return self._body(self.chunk_kind, [self._choice(index, delta, whole=False)])

    def usage(self, usage: Usage) -> Json:
        return self._body(self.chunk_kind, [], usage)

    @abstractmethod
    def _choice(self, index: int, delta: Delta, *, whole: bool) -> Json: ...

    def _body(self, kind: str, choices: Sequence[Json], usage: Usage | None = None) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            "usage": None if usage is None else usage.body,
        }


class ChatFormat(Format):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, weights: str, codec: TextCodec, *, logprobs: bool) -> None:
        super().__init__(model, weights, codec, logprobs=logprobs)
        self._calls: dict[int, int] = {}  # how many of each choice were sent

    def opening(self, index: int) -> Json:
        part: dict[str, Json] = {"delta": {"role": "assistant", "content": ""}}
        return self._body(self.chunk_kind, [self._with_logprobs(index, part, Delta())])

    def _choice(self, index: int, delta: Delta, *, whole: bool) -> Json:
        part = {"message": _message(delta)} if whole else {"delta": self._new_content(index, delta)}
        return self._with_logprobs(index, part, delta)

    def _new_content(self, index: int, delta: Delta) -> Json:
        content: Json = {"content": delta.text} if delta.text else {}
        if delta.calls:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(delta.calls)
            content["tool_calls"] = [{"index": first + n, **_call(call)} for n, call in enumerate(delta.calls)]
        return content

    def _with_logprobs(self, index: int, part: Mapping[str, Json], delta: Delta) -> Json:
        content = [
            {
                **self._named(token.token, token.logprob),
                "top_logprobs": [self._named(each, logprob) for each, logprob in token.top],
            }
            for token in (delta.tokens if self._logprobs else ())
        ]
        logprobs = {"content": content, "refusal": None} if self._logprobs else None
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _named(self, token: int, logprob: float) -> Json:
        text = self._codec.token_text(token)
        whole = "\ufffd" not in text  # a part of a character has no text, and a tokenizer does not tell its bytes
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


class CompletionFormat(Format):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, delta: Delta, *, whole: bool) -> Json:
        logprobs = self._table(delta.tokens) if self._logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _table(self, tokens: Sequence[TokenLogprob]) -> Json:
        """Tokens that are parts of characters may have the same text: of those the likeliest is listed."""
        text = self._codec.token_text
        tops = [{text(each): _finite(logprob) for each, logprob in reversed(token.top)} for token in tokens]
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
