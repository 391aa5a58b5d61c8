"""One sample on its way to the client: tokens come in; text, tool calls and log-probabilities go out.

Tokens pass three filters: :class:`Detokenizer`, :class:`StopFilter` and, where tools are offered,
:class:`ToolCallFilter`. Each hands on what later tokens cannot change, and holds back the rest.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from twinkle.sampler.types import Progress, SampledSequence, StopReason, TopLogprobs
from twinkle.server.backends.text_codec import TextCodec

_INCOMPLETE = "\ufffd"  # how the bytes of a character read until all of them are there
_LONGEST = 16  # tokens: what is no character by then never becomes one, and decoding more each time takes longer


class Detokenizer:
    """Turns tokens that come one by one into text. What it returned in all is the text of all tokens together."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._before: list[int] = []  # complete, and decoded again because some tokenizers look back one word
        self._fresh: list[int] = []
        self._shown = 0  # characters of the text of both that were handed out
        self._text = ""

    def push(self, token: int) -> str:
        self._fresh.append(token)
        text = self._codec.decode(self._before + self._fresh)
        final = text if len(self._fresh) >= _LONGEST else text.rstrip(_INCOMPLETE)
        new = final[self._shown :]
        if final == text and not new:  # a token without text
            self._fresh.pop()
            return ""
        self._shown = max(self._shown, len(final))
        self._text = text
        if final == text:
            self._before, self._fresh = self._fresh, []
            self._shown = len(self._codec.decode(self._before))
            self._text = ""
        return new

    def close(self) -> str:
        """Return what never became a complete character."""
        rest, self._text = self._text[self._shown :], ""
        return rest


class StopFilter:
    """Passes text up to the first stop string; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        keep = min(found) if found else len(self._held) - _possible_beginning(self._stops, self._held)
        passed, self._held = self._held[:keep], self._held[keep:]
        return passed

    def close(self) -> str:
        rest, self._held = self._held, ""
        return "" if self.stopped else rest


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text, as this protocol has it; ``index`` counts the calls of a sample."""

    name: str
    arguments: str
    index: int
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolCallFilter:
    """Takes tool calls out of text that comes in pieces: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    Hermes and Qwen models write calls so. A call that cannot be read stays text; blanks around calls are dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        self._blanks = ""
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls that are complete now."""
        self._held += text
        passed, calls = "", []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                keep = len(self._held) - _possible_beginning((_OPEN,), self._held)
                passed += self._spaced(self._held[:keep])
                self._held = self._held[keep:]
                break
            passed += self._spaced(self._held[:start])
            self._held = self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                break
            call = _call(self._held[len(_OPEN) : end], self.calls)
            whole, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            if call is None:
                passed += self._spaced(whole)
            else:
                calls.append(call)
                self.calls += 1
                self._blanks = ""
        return passed, calls

    def close(self) -> str:
        """Return the rest: a call without an end is text, and blanks after the last call are dropped."""
        rest = self._spaced(self._held)
        self._held = ""
        return rest if self.calls else rest + self._blanks

    def _spaced(self, text: str) -> str:
        """Return text without its last blanks, which are held back: a call may follow them."""
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        return kept


def _call(text: str, index: int) -> ToolCall | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match content:
        case {"name": str() as name, **others} if isinstance(arguments := others.get("arguments", {}), dict):
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False), index)
    return None


def _possible_beginning(marks: Sequence[str], text: str) -> int:
    """Return how many characters at the end of ``text`` may grow into one of the marks."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)


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
    """The part of a sample that has become final."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls or self.tokens or self.finish_reason)


class Choice:
    """One sample: takes its tokens in, and returns what the client can be sent of it."""

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
