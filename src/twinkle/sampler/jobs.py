"""Requests under way: a :class:`Job` is one request, a :class:`Sequence` one of its samples.

A job begins with a single sequence, which computes the prompt. From the prompt's last row the first token of every
sample is drawn; the other samples then join with that token.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twinkle.errors import NonFiniteError
from twinkle.model.adapter import Adapter
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.drawing import Draw, Drawn
from twinkle.sampler.model_pass import Computed, Piece
from twinkle.sampler.noise import uniform
from twinkle.sampler.types import SampledSequence, SampleResult, StopReason, TopLogprobs
from twinkle.sampler.validation import CheckedRequest

_EMPTY_LOGPROB = -99999.0  # of a cell of TopLogprobs that holds nothing
_MARGIN = 8  # tokens: decoding may spoil the first of those it is given (a cut character, a space left out)


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(eq=False)
class Sequence:
    """``cached`` of its tokens, prompt and generated ones, have their keys and values in ``blocks``."""

    job: "Job"
    index: int  # which of the samples
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    stop_reason: StopReason | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.job.number, self.index

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.job.prompt_length :]

    def add(self, drawn: Drawn) -> None:
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if self.job.ends(self):
            self.stop_reason = "stop"
        elif len(self.logprobs) >= self.job.request.max_tokens:
            self.stop_reason = "length"


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
    scores: FloatArray | None = None
    top: TopLogprobs | None = None

    def __post_init__(self) -> None:
        request, length = self.request, len(self.request.prompt)
        self.sequences.append(Sequence(self, 0, request.prompt.tolist()))
        if request.prompt_logprobs:
            self.scores = np.full(length, np.nan, np.float32)
        if request.topk_prompt_logprobs:
            shape = (length, request.topk_prompt_logprobs)
            self.top = TopLogprobs(np.zeros(shape, np.int64), np.full(shape, _EMPTY_LOGPROB, np.float32))

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def done(self) -> bool:
        return self.prompt_done and all(sequence.stop_reason is not None for sequence in self.sequences)

    def piece(self, sequence: Sequence, start: int, stop: int) -> Piece:
        """What to compute of ``sequence.tokens[start:stop]``."""
        targets = self._targets(sequence, start, stop)
        return Piece(
            self.version,
            np.array(sequence.tokens[start:stop], np.int64),
            start,
            sequence.blocks,
            draws=self._draws(sequence) if stop == len(sequence.tokens) else (),
            targets=targets,
            top=0 if targets is None else self.request.topk_prompt_logprobs,
        )

    def absorb(self, sequence: Sequence, start: int, computed: Computed) -> list[Sequence]:
        """Take in what was computed; returns the samples that the prompt's end brought forth."""
        self._absorb_scores(start, computed)
        if not all(drawn.finite for drawn in computed.drawn):
            raise NonFiniteError("the model's logits hold NaN or infinity for this prompt and version")
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

    def ends(self, sequence: Sequence) -> bool:
        """Whether the newest token ends the sample."""
        if sequence.tokens[-1] in self.end_tokens:
            return True
        strings = self.request.params.stop_strings
        if not strings or self.tokenizer is None:
            return False
        # A token has at least one byte, so a string cannot reach further back than it has bytes.
        reach = max(len(text.encode()) for text in strings) + _MARGIN
        tail = sequence.tokens[max(self.prompt_length, len(sequence.tokens) - reach) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    def result(self) -> SampleResult:
        sequences = []
        for sequence in self.sequences:
            assert sequence.stop_reason is not None, "a result has no open ends"
            tokens, logprobs = np.array(sequence.generated, np.int64), np.array(sequence.logprobs, np.float32)
            sequences.append(SampledSequence(tokens, logprobs, sequence.stop_reason))
        return SampleResult(sequences, self.scores, self.top)

    def _draws(self, sequence: Sequence) -> tuple[Draw, ...]:
        """The next token of the sample; at the end of the prompt, the first token of every sample."""
        params, position = self.request.params, len(sequence.logprobs)
        samples = [sequence.index] if self.prompt_done else range(self.request.num_samples)
        return tuple(
            Draw(params.temperature, params.top_k, params.top_p, uniform(self.request.seed, sample, position))
            for sample in samples
        )

    def _targets(self, sequence: Sequence, start: int, stop: int) -> IntArray | None:
        """The prompt tokens that these rows predict, while they are still to be scored."""
        if self.prompt_done or (self.scores is None and self.top is None):
            return None
        return self.request.prompt[start + 1 : stop + 1]

    def _absorb_scores(self, start: int, computed: Computed) -> None:
        if computed.scores is None:
            return
        if not np.isfinite(computed.scores).all():
            raise NonFiniteError("log-probabilities of the prompt are NaN or infinite under this version")
        rows = slice(start + 1, start + 1 + len(computed.scores))
        if self.scores is not None:
            self.scores[rows] = computed.scores
        if self.top is not None and computed.top_ids is not None and computed.top_logprobs is not None:
            self.top.token_ids[rows] = computed.top_ids
            self.top.logprobs[rows] = computed.top_logprobs
