"""Writing answers as OpenAI's clients read them, whole or in chunks.

JSON has no infinity: log-probabilities that are not finite are written as −9999.
"""

import hashlib
import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from twinkle.server.gateway.sampling_targets import Target
from twinkle.server.protocols.openai.choices import Delta, TokenLogprob, ToolCall
from twinkle.server.protocols.openai.generation import Format, Json, Usage
from twinkle.server.protocols.openai.requests import GenerationFields

_IMPOSSIBLE = -9999.0


class OpenAiFormat(Format):
    """Writes the answer to one request, as chat or as text completion."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, wanted: GenerationFields, target: Target) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = wanted.model
        # A client sees by the fingerprint whether two answers come from the same weights.
        self._fingerprint = "fp_" + hashlib.blake2b(target.weights.encode(), digest_size=6).hexdigest()
        self._codec = target.codec
        self._logprobs = wanted.top is not None
        self._include_usage = wanted.include_usage

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        written = [self._choice(*each, whole=True) for each in enumerate(choices)]
        return self._body(self.whole_kind, written, _counts(usage))

    def opening(self, index: int) -> list[Json]:
        return []

    def chunk(self, index: int, delta: Delta) -> list[Json]:
        return [self._body(self.chunk_kind, [self._choice(index, delta, whole=False)])]

    def ending(self, usage: Usage) -> list[Json]:
        return [self._body(self.chunk_kind, [], _counts(usage))] if self._include_usage else []

    @abstractmethod
    def _choice(self, index: int, delta: Delta, *, whole: bool) -> Json: ...

    def _body(self, kind: str, choices: Sequence[Json], usage: Json | None = None) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            "usage": usage,
        }


class ChatFormat(OpenAiFormat):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[Json]:
        part: dict[str, Json] = {"delta": {"role": "assistant", "content": ""}}
        return [self._body(self.chunk_kind, [self._with_logprobs(index, part, Delta())])]

    def _choice(self, index: int, delta: Delta, *, whole: bool) -> Json:
        part = {"message": _message(delta)} if whole else {"delta": _new_content(delta)}
        return self._with_logprobs(index, part, delta)

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
        whole = "\ufffd" not in text  # a token that is part of a character has no text, and its bytes are not known
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


class CompletionFormat(OpenAiFormat):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, delta: Delta, *, whole: bool) -> Json:
        logprobs = self._table(delta.tokens) if self._logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _table(self, tokens: Sequence[TokenLogprob]) -> Json:
        """Return the log-probabilities of tokens as this format lists them.

        The top tokens are listed by their text. Tokens that are parts of characters can have the same text; of those
        only the likeliest is listed.
        """
        text = self._codec.token_text
        tops = [{text(each): _finite(logprob) for each, logprob in reversed(token.top)} for token in tokens]
        return {
            "tokens": [text(token.token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens],
        }


def _counts(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _message(delta: Delta) -> Json:
    message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.thoughts:
        message["reasoning_content"] = delta.thoughts
    if delta.calls:
        message |= {"content": delta.text or None, "tool_calls": [_call(call) for call in delta.calls]}
    return message


def _new_content(delta: Delta) -> Json:
    content: Json = {"content": delta.text} if delta.text else {}
    if delta.thoughts:
        content["reasoning_content"] = delta.thoughts
    if delta.calls:
        content["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
    return content


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
