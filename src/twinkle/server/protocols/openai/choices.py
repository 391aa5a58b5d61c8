"""One sample on its way to the client: tokens come in, text, calls of tools and log-probabilities go out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from twinkle.sampler.types import Progress, SampledSequence, StopReason, TopLogprobs
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.protocols.openai.text_stream import Detokenizer, StopFilter
from twinkle.server.protocols.openai.tool_calls import ToolCall, ToolCallFilter

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class TokenLogprob:
    """``top``: the likeliest tokens at this place; ``offset``: where in the text of the sample the token begins."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Delta:
    """What became final of a sample."""

    text: str
    calls: tuple[ToolCall, ...]
    tokens: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls or self.tokens or self.finish_reason)


class Choice:
    def __init__(self, codec: TextCodec, stops: Sequence[str], *, tools: bool) -> None:
        self._detokenizer = Detokenizer(codec)
        self._stop = StopFilter(stops)
        self._tools = ToolCallFilter() if tools else None
        self._characters = 0
        self.completion_tokens = 0

    def push(self, part: Progress | SampledSequence) -> Delta:
        """Take in some of the sample's tokens, or all of them."""
        text, offsets = [], []
        for token in part.tokens.tolist():
            offsets.append(self._characters)
            text.append(self._detokenizer.push(token))
            self._characters += len(text[-1])
        if part.stop_reason is not None:
            text.append(self._detokenizer.close())
        self.completion_tokens += len(offsets)
        passed = self._stop.push("".join(text))
        if part.stop_reason is not None:
            passed += self._stop.close()
        passed, calls = self._without_calls(passed, part.stop_reason is not None)
        reason = None if part.stop_reason is None else self._finish_reason(part.stop_reason)
        return Delta(passed, tuple(calls), _logprobs(part, offsets), reason)

    def _without_calls(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        if self._tools is None:
            return text, []
        passed, calls = self._tools.push(text)
        return (passed + self._tools.close() if last else passed), calls

    def _finish_reason(self, reason: StopReason) -> FinishReason:
        if self._tools is not None and self._tools.calls and reason == "stop":
            return "tool_calls"
        return "stop" if self._stop.stopped else reason


def _logprobs(part: Progress | SampledSequence, offsets: Sequence[int]) -> tuple[TokenLogprob, ...]:
    tops = _tops(part.topk_logprobs, len(offsets))
    values = zip(part.tokens.tolist(), part.logprobs.tolist(), tops, offsets, strict=True)
    return tuple(TokenLogprob(token, logprob, top, offset) for token, logprob, top, offset in values)


def _tops(table: TopLogprobs | None, length: int) -> list[tuple[tuple[int, float], ...]]:
    if table is None:
        return [()] * length
    return [
        tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if np.isfinite(logprob))
        for ids, logprobs in zip(table.token_ids.tolist(), table.logprobs.tolist(), strict=True)
    ]
