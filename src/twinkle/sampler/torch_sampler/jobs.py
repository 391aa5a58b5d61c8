"""Requests under way: a :class:`Job` is one request, a :class:`Sequence` one of its samples.

A job begins with a single sequence, which computes the prompt. From the prompt's last row the first token of every
sample is drawn; the other samples then join with that token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from twinkle.errors import NonFiniteError
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.noise import uniforms, words
from twinkle.sampler.torch_sampler.drawing import Draw, Drawn
from twinkle.sampler.torch_sampler.model_pass import Ahead, Computed, Piece
from twinkle.sampler.torch_sampler.prefix_cache import BASE
from twinkle.sampler.torch_sampler.prompt_scores import PromptScores
from twinkle.sampler.types import Progress, SampledSequence, SampleResult, StopReason, TopLogprobs
from twinkle.sampler.validation import CheckedRequest

_MARGIN = 8  # tokens: decoding may spoil the first of those it is given (a cut character, a space left out)


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(eq=False)
class Sequence:
    """``cached`` of its tokens, prompt and generated ones, have their keys and values in ``blocks``.

    What belongs to the schedule: whether it is running, in what way its positions are encoded (``length_class``), and
    what its full blocks are called.
    """

    job: "Job"
    index: int  # which of the samples
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)  # one row each
    stop_reason: StopReason | None = None
    streamed: int = 0  # generated tokens that were handed over
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    running: bool = False
    turn: int = 0  # when it was computed last, where that counts
    length_class: int = 0
    names: list[bytes] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.job.number, self.index

    def add(self, drawn: Drawn) -> None:
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            self.tops.append(drawn.top)
        if self.job.ends(self):
            self.stop_reason = "stop"
        elif len(self.logprobs) >= self.job.request.max_tokens:
            self.stop_reason = "length"

    def generated(self, start: int = 0) -> tuple[IntArray, FloatArray, TopLogprobs | None]:
        """What has been drawn, from token number ``start`` on: tokens, their log-probabilities, the likeliest."""
        tokens, tops = self.tokens[self.job.prompt_length + start :], self.tops[start:]
        top = None
        if tops:
            ids, values = ([each.token_ids for each in tops], [each.logprobs for each in tops])
            top = TopLogprobs(np.concatenate(ids), np.concatenate(values))
        return np.array(tokens, np.int64), np.array(self.logprobs[start:], np.float32), top


@dataclass(eq=False)
class Job:
    """A request, its samples, and what has been found out about its prompt."""

    request: CheckedRequest
    version: Adapter | None
    number: int  # counts requests
    end_tokens: frozenset[int]  # those that end this request's samples
    tokenizer: Tokenizer | None
    sequences: list[Sequence] = field(default_factory=list)
    stem: list[int] = field(default_factory=list)  # the prompt's blocks, kept for samples that have not begun
    prompt_done: bool = False
    prompt_reached: int = 0  # so many of the prompt's tokens have been in the cache
    prompt_reused: int = 0  # so many of those were there already
    scores: PromptScores = field(init=False)

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self, 0, self.request.prompt.tolist()))
        self.scores = PromptScores(self.request)

    @cached_property
    def draw(self) -> Draw:
        """How a token is drawn, but for the random number."""
        params = self.request.params
        return Draw(params.temperature, params.top_k, params.top_p, 0.0, self.request.topk_sample_logprobs)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def scope(self) -> str:
        """Whose request it is: places are shared among scopes."""
        return self.request.scope

    @property
    def longest(self) -> int:
        """Tokens that a sample may have in the cache: nothing is computed of the last one."""
        return self.prompt_length + self.request.max_tokens - 1

    @property
    def done(self) -> bool:
        return self.prompt_done and all(sequence.stop_reason is not None for sequence in self.sequences)

    @property
    def version_key(self) -> int:
        """Tells versions apart while they are published or used."""
        return BASE if self.version is None else id(self.version)

    def reusable(self, sequence: Sequence) -> int:
        """So many of the sequence's tokens need not be computed: not the last one, nor what is to be scored."""
        if self.prompt_done:
            return len(sequence.tokens) - 1
        return min(self.prompt_length, self.scores.first) - 1

    def reached(self, tokens: int, *, reused: bool) -> None:
        """So many tokens of the prompt are in the cache now; a sequence that gave way does not count as new."""
        fresh = min(tokens, self.prompt_length) - self.prompt_reached
        if fresh > 0:
            self.prompt_reached += fresh
            self.prompt_reused += fresh if reused else 0

    def piece(self, sequence: Sequence, start: int, stop: int) -> Piece:
        """What to compute of ``sequence.tokens[start:stop]``."""
        return Piece(
            self.version,
            np.array(sequence.tokens[start:stop], np.int64),
            start,
            sequence.blocks,
            draws=self._draws(sequence) if stop == len(sequence.tokens) else (),
            scoring=None if self.prompt_done else self.scores.scoring(start, stop),
        )

    def ahead(self, sequence: Sequence) -> Ahead:
        """The sequence as it is, to draw several tokens of it."""
        request = self.request
        return Ahead(
            self.version,
            sequence.tokens[-1],
            len(sequence.tokens) - 1,
            sequence.blocks,
            self.draw,
            request.seed,
            sequence.index,
            len(sequence.logprobs),
        )

    def absorb(self, sequence: Sequence, start: int, stop: int, computed: Computed) -> list[Sequence]:
        """Take in what was computed; returns the samples that the prompt's end brought forth."""
        if computed.scores is not None:
            self.scores.absorb(start, stop, computed.scores)
        if not all(drawn.finite for drawn in computed.drawn):
            raise _not_finite()
        if not computed.drawn:
            return []
        if self.prompt_done:
            sequence.add(computed.drawn[0])
            return []
        self.prompt_done = True
        prompt = list(sequence.tokens)
        fresh = [Sequence(self, index, list(prompt)) for index in range(1, self.request.num_samples)]
        self.sequences += fresh
        for each, drawn in zip(self.sequences, computed.drawn, strict=True):
            each.add(drawn)
        return fresh

    def absorb_ahead(self, sequence: Sequence, drawn: list[Drawn]) -> int:
        """Take in tokens up to the end of the sample; returns how many that were."""
        for number, each in enumerate(drawn, start=1):
            if not each.finite:
                raise _not_finite()
            sequence.add(each)
            if sequence.stop_reason is not None:
                return number
        return len(drawn)

    def ends(self, sequence: Sequence) -> bool:
        """Whether the newest token ends the sample."""
        if sequence.tokens[-1] in self.end_tokens:
            return True
        strings, tokenizer = self.request.params.stop_strings, self.tokenizer
        if not strings or tokenizer is None:
            return False
        first = max(self.prompt_length, len(sequence.tokens) - longest_match(strings))
        return holds_one_of(strings, sequence.tokens[first:], tokenizer)

    def progress(self) -> list[Progress]:
        """What has been drawn since the last time."""
        return [self._progress(each) for each in self.sequences if each.streamed < len(each.logprobs)]

    def result(self) -> SampleResult:
        sequences = []
        for sequence in self.sequences:
            assert sequence.stop_reason is not None, "a result has no open ends"
            tokens, logprobs, top = sequence.generated()
            sequences.append(SampledSequence(tokens, logprobs, sequence.stop_reason, top))
        return SampleResult(
            sequences,
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.top,
            target_prompt_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.drawn,
            cached_prompt_tokens=self.prompt_reused,
        )

    def _progress(self, sequence: Sequence) -> Progress:
        tokens, logprobs, top = sequence.generated(sequence.streamed)
        sequence.streamed = len(sequence.logprobs)
        return Progress(self.request.request_id, sequence.index, tokens, logprobs, top, sequence.stop_reason)

    def _draws(self, sequence: Sequence) -> tuple[Draw, ...]:
        """The next token of the sample; at the end of the prompt, the first token of every sample."""
        samples = [sequence.index] if self.prompt_done else range(self.request.num_samples)
        noise = uniforms(words(self.request.seed), words(*samples), words(len(sequence.logprobs)))
        return tuple(replace(self.draw, uniform=number) for number in noise.tolist())


def longest_match(strings: Iterable[str]) -> int:
    """Tokens: each has at least one byte, so a string cannot reach further back than it has bytes."""
    return max(len(text.encode()) for text in strings) + _MARGIN


def holds_one_of(strings: Iterable[str], tokens: list[int], tokenizer: Tokenizer) -> bool:
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(string in text for string in strings)


def _not_finite() -> NonFiniteError:
    return NonFiniteError("the model's logits hold NaN or infinity for this prompt and version")
