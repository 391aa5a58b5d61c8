"""Turns the tokens of one sample into text, tool calls and log-probabilities for the client, as the tokens come.

Tokens pass three filters: :class:`Detokenizer`, :class:`StopFilter` and, if the request offers tools,
:class:`ToolCallFilter`. Each passes on the text that later tokens cannot change, and holds back the rest. Before them,
a :class:`~.channels.ChannelFilter` takes out thoughts, where the model marks them by channels.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from twinkle.sampler.types import Progress, SampledSequence, StopReason, TopLogprobs
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.protocols.openai.channels import ChannelFilter

_INCOMPLETE = "\ufffd"  # what a tokenizer returns for a character of which some bytes are still missing
_LONGEST = 16  # tokens; bytes that are no character by then never become one, and waiting longer makes decoding slow


class Detokenizer:
    """Turns tokens that come one by one into text. All parts that it returns make up the text of all tokens."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # Tokens whose text is complete. They are decoded again with the next ones, because the text of a token can
        # depend on the word before it.
        self._before: list[int] = []
        self._fresh: list[int] = []  # tokens after them
        self._shown = 0  # characters of the text of both lists that were returned
        self._text = ""  # the text of both lists

    def push(self, token: int) -> str:
        """Take the next token and return the text that is complete with it."""
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
        """Return the rest of the text, which never became complete characters."""
        rest, self._text = self._text[self._shown :], ""
        return rest


class StopFilter:
    """Passes text up to the first stop string. Text that may be the beginning of a stop string is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        places = {stop: place for stop in self._stops if (place := self._held.find(stop)) >= 0}
        self.found = min(places, key=lambda stop: places[stop], default=None)
        possible = _possible_beginning(self._stops, self._held)
        keep = len(self._held) - possible if self.found is None else places[self.found]
        passed, self._held = self._held[:keep], self._held[keep:]
        return passed

    def close(self) -> str:
        rest, self._held = self._held, ""
        return "" if self.stopped else rest


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a sample. ``arguments`` is JSON text, as in the protocol. ``index``: its number in the sample."""

    name: str
    arguments: str
    index: int
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolCallFilter:
    """Takes tool calls out of text that comes in pieces: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    Hermes and Qwen models write calls in this form. A call that cannot be parsed stays text. White space before a call
    is dropped, and so is white space at the end of a text that had calls.
    """

    def __init__(self) -> None:
        self._held = ""
        self._blanks = ""
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take the next piece of text; return the text and the calls that are complete with it."""
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
        """Return the rest of the text. An unfinished call is text; white space at the end goes if there were calls."""
        rest = self._spaced(self._held)
        self._held = ""
        return rest if self.calls else rest + self._blanks

    def _spaced(self, text: str) -> str:
        """Return text without white space at its end, which is held back because a call may follow it."""
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        return kept


def _call(text: str, index: int) -> ToolCall | None:
    """Return the call in the text; None if it is none. Python reads NaN and 1e999 as JSON, but clients do not."""
    try:
        match json.loads(text):
            case {"name": str() as name, **others} if isinstance(arguments := others.get("arguments", {}), dict):
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False), index)
    except (ValueError, RecursionError):
        pass
    return None


def _possible_beginning(marks: Sequence[str], text: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of the marks."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a sampled token.

    ``top``: the likeliest tokens at its position. ``offset``: number of characters of the sample's text before it.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Delta:
    """A part of a sample that later tokens cannot change.

    The last part has a ``finish_reason``, and in ``stopped_by`` the stop string that ended the text, if one did.
    """

    text: str = ""
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.thoughts or self.calls or self.tokens or self.finish_reason)


class Choice:
    """One sample: takes its tokens and returns the parts that can be sent to the client."""

    def __init__(
        self, codec: TextCodec, stops: Sequence[str], *, tools: bool, channels: ChannelFilter | None = None
    ) -> None:
        """Create the choice. channels: None: all tokens are text for the client."""
        self._detokenizer = Detokenizer(codec)
        self._channels = channels
        self._thoughts = Detokenizer(codec)
        self._stop = StopFilter(stops)
        self._tools = ToolCallFilter() if tools else None
        self._characters = 0
        self.completion_tokens = 0

    def push(self, part: Progress | SampledSequence) -> Delta:
        """Take some or all of the sample's tokens; return what became final with them."""
        text, thoughts, offsets = [], [], []
        for token in part.tokens.tolist():
            offsets.append(self._characters)
            kind = "text" if self._channels is None else self._channels.push(token)
            if kind == "text":
                text.append(self._detokenizer.push(token))
                self._characters += len(text[-1])
            elif kind == "thought":
                thoughts.append(self._thoughts.push(token))
        if part.stop_reason is not None:
            text.append(self._detokenizer.close())
            thoughts.append(self._thoughts.close())
        self.completion_tokens += len(offsets)
        passed = self._stop.push("".join(text))
        if part.stop_reason is not None:
            passed += self._stop.close()
        passed, calls = self._without_calls(passed, part.stop_reason is not None)
        reason = None if part.stop_reason is None else self._finish_reason(part.stop_reason)
        stopped_by = None if reason is None else self._stop.found
        return Delta(passed, "".join(thoughts), tuple(calls), _logprobs(part, offsets), reason, stopped_by)

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
