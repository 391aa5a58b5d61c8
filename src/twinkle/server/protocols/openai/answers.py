"""Generating the answer to a request, whole or in chunks. All samples of all its prompts are generated together.

JSON has no infinity: log-probabilities that are not finite are written as −9999.
"""

import hashlib
import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.gateway.sampling_targets import Target
from twinkle.server.protocols.openai.choices import Choice, Delta, TokenLogprob, ToolCall
from twinkle.server.protocols.openai.requests import GenerationFields
from twinkle.server.tenancy.work_pools import FairPool

Json = dict[str, object]
_IMPOSSIBLE = -9999.0


class Format(ABC):
    """Writes the answer to one request, as chat or as text completion. All chunks of an answer have the same ``id``."""

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

    def whole(self, choices: Sequence[Delta], usage: Json) -> Json:
        """Return the body of a whole answer."""
        return self._body(self.whole_kind, [self._choice(*each, whole=True) for each in enumerate(choices)], usage)

    def opening(self, index: int) -> Json | None:
        """Return the chunk that begins a choice; None if this format has none."""
        return None

    def chunk(self, index: int, delta: Delta) -> Json:
        """Return the chunk for a new part of one choice."""
        return self._body(self.chunk_kind, [self._choice(index, delta, whole=False)])

    def usage(self, usage: Json) -> Json:
        """Return the last chunk of a stream, with the numbers of tokens."""
        return self._body(self.chunk_kind, [], usage)

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


class ChatFormat(Format):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json:
        part: dict[str, Json] = {"delta": {"role": "assistant", "content": ""}}
        return self._body(self.chunk_kind, [self._with_logprobs(index, part, Delta())])

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


class CompletionFormat(Format):
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


def _message(delta: Delta) -> Json:
    message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.calls:
        message |= {"content": delta.text or None, "tool_calls": [_call(call) for call in delta.calls]}
    return message


def _new_content(delta: Delta) -> Json:
    content: Json = {"content": delta.text} if delta.text else {}
    if delta.calls:
        content["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
    return content


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


@dataclass(frozen=True)
class Generation:
    """A request that is ready to be generated.

    prompts: tokens of each prompt; choice number i belongs to prompt i // wanted.samples.
    form: writes the answer, and has its id.
    text: the thread pool for decoding text.
    tools: whether the answer may contain tool calls.
    """

    wanted: GenerationFields
    prompts: Sequence[Sequence[int]]
    form: Format
    target: Target
    text: FairPool
    tools: bool

    async def answer(self) -> bytes:
        """Return the whole answer as JSON."""
        session = self.target.session
        results = await self.target.sampling.results(session, self._requests(stream=False))
        return await self.text.in_thread(session.tenant_id, partial(self._assemble, results))

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Yield the answer in chunks, as it is generated."""
        choices = self._choices()
        opened: set[int] = set()
        cached = 0
        generated = self.target.sampling.generate(self.target.session, self._requests(stream=True))
        async with aclosing(generated) as items:
            async for number, item in items:
                if isinstance(item, SampleResult):
                    cached += item.cached_prompt_tokens
                    continue
                index = number * self.wanted.samples + item.index
                opening = self.form.opening(index) if index not in opened else None
                opened.add(index)
                if opening is not None:
                    yield opening
                delta = choices[index].push(item)
                if not delta.empty:
                    yield self.form.chunk(index, delta)
        if self.wanted.include_usage:
            yield self.form.usage(self._usage(choices, cached))

    def waiting_for(self) -> str:
        """Return a line for a client that has no part of its answer yet: why it is queued, or that it is not."""
        reasons = map(self.target.sampling.why_queued, map(self._request_id, range(len(self.prompts))))
        return next((reason for reason in reasons if reason is not None), "the prompt is being computed")

    def _choices(self) -> list[Choice]:
        count = len(self.prompts) * self.wanted.samples
        return [Choice(self.target.codec, self.wanted.stop, tools=self.tools) for _ in range(count)]

    def _assemble(self, results: Sequence[SampleResult]) -> bytes:
        """Return the whole answer as JSON. Runs in a thread, because decoding many long samples takes a while."""
        choices = self._choices()
        sequences = [sequence for result in results for sequence in result.sequences]
        deltas = [choice.push(sequence) for choice, sequence in zip(choices, sequences, strict=True)]
        usage = self._usage(choices, sum(result.cached_prompt_tokens for result in results))
        return json.dumps(self.form.whole(deltas, usage), allow_nan=False).encode()

    def _usage(self, choices: Sequence[Choice], cached: int) -> Json:
        prompt = sum(len(tokens) for tokens in self.prompts)
        completion = sum(choice.completion_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        return [
            SampleRequest(
                request_id=self._request_id(number),
                version_id=self.target.session.version_id,
                prompt=np.array(tokens, np.int64),
                params=self.wanted.params,
                num_samples=self.wanted.samples,
                topk_sample_logprobs=self.wanted.top or 0,
                stream=stream,
            )
            for number, tokens in enumerate(self.prompts)
        ]

    def _request_id(self, number: int) -> str:
        return f"{self.form.id}-{number}"
