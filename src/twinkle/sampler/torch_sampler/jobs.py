"""Active requests: a :class:`Job` is one request, a :class:`Sequence` is one of its samples.

A job begins with a single sequence, which computes the prompt. The first token of every sample is drawn from the
prompt's last row. Only then are the sequences of the other samples created, each with its first token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from twinkle.errors import NonFiniteError
from twinkle.model.adapters.adapter import Adapter
from twinkle.model.types import FloatArray, IntArray, RouteArray
from twinkle.sampler.noise import uniforms, words
from twinkle.sampler.torch_sampler.drawing import Draw, Drawn, Penalties
from twinkle.sampler.torch_sampler.model_pass import Ahead, Computed, Piece
from twinkle.sampler.torch_sampler.prefix_cache import BASE
from twinkle.sampler.torch_sampler.prompts.prompt_images import PromptImages
from twinkle.sampler.torch_sampler.prompts.prompt_scores import PromptScores
from twinkle.sampler.types import Progress, SampledSequence, SampleResult, StopReason, TopLogprobs
from twinkle.sampler.validation import CheckedRequest

# Additional tokens to decode: text decoded from the middle of a sequence may be wrong at its start (a character cut in
# two, a missing space).
_MARGIN = 8


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer that the sampler uses."""

    eos_token_id: int | None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(eq=False)
class Sequence:
    """One sample of a job: its tokens (prompt and generated) and its cache blocks.

    The keys and values of the first ``cached`` tokens are in ``blocks``. Only the schedule changes these two, and the
    fields ``running``, ``turn``, ``length_class`` (how positions are encoded), ``names`` (of its full blocks, see
    ``prefix_cache``), ``state`` and ``failed_at``.
    """

    job: "Job"
    index: int  # number of the sample within its job
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)  # one entry, of one row, for each generated token
    stop_reason: StopReason | None = None
    streamed: int = 0  # how many generated tokens were already streamed
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    running: bool = False
    turn: int = 0  # when it was computed last; only used without a cache
    length_class: int = 0
    names: list[bytes] = field(default_factory=list)
    routes: list[RouteArray] = field(default_factory=list)  # of its first tokens, if the request asks for them
    routed: int = 0  # how many tokens these are
    state: int | None = None  # in a model with linear attention: the slot of the state behind the cached tokens
    failed_at: int = 0  # and how many tokens it had when a pass of it alone failed last

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key: by arrival of the request, then by number of the sample."""
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

    def keep_routes(self, start: int, routes: RouteArray) -> None:
        """Store the routes of tokens from index ``start`` on; those that are known since an earlier pass stay."""
        known = self.routed - start
        assert known >= 0, "the tokens of a request that asks for routes are computed one after another"
        if known < len(routes):
            self.routes.append(routes[known:])
            self.routed = start + len(routes)

    def generated(self, start: int = 0) -> tuple[IntArray, FloatArray, TopLogprobs | None]:
        """Return what has been drawn from generated token ``start`` on: tokens, log-probabilities, likeliest tokens."""
        tokens, tops = self.tokens[self.job.prompt_length + start :], self.tops[start:]
        top = None
        if tops:
            ids, values = ([each.token_ids for each in tops], [each.logprobs for each in tops])
            top = TopLogprobs(np.concatenate(ids), np.concatenate(values))
        return np.array(tokens, np.int64), np.array(self.logprobs[start:], np.float32), top


@dataclass(eq=False)
class Job:
    """A request, its samples, and the scores of its prompt so far."""

    request: CheckedRequest
    version: object | None  # what it samples from, an adapter or a set of weights; None: the base model
    number: int  # requests are numbered in the order of arrival
    end_tokens: frozenset[int]  # tokens that end this request's samples
    tokenizer: Tokenizer | None
    sequences: list[Sequence] = field(default_factory=list)
    stem: list[int] = field(default_factory=list)  # the prompt's blocks, kept for samples that have not begun
    stem_state: int | None = None  # and the slot of the state behind the prompt
    prompt_done: bool = False
    prompt_reached: int = 0  # how many of the prompt's tokens have been in the cache at least once
    prompt_reused: int = 0  # how many of those were found there, computed earlier
    scores: PromptScores = field(init=False)
    images: PromptImages = field(init=False)

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self, 0, self.request.prompt.tolist()))
        self.scores = PromptScores(self.request)
        self.images = PromptImages(len(self.request.prompt), self.request.images)

    @cached_property
    def draw(self) -> Draw:
        """Return the settings for drawing a token, without the random number and the penalties."""
        params = self.request.params
        top = self.request.topk_sample_logprobs
        return Draw(params.temperature, params.top_k, params.top_p, 0.0, top, params.min_p)

    @cached_property
    def prompt_tokens(self) -> IntArray:
        """Return the different tokens of the prompt. A long prompt is searched for them once, not at every draw."""
        return np.unique(self.request.prompt)

    @cached_property
    def _shift(self) -> int:
        """Return position − index of all generated tokens."""
        return self.images.shift(self.prompt_length)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def scope(self) -> str:
        """Return the scope of the request (on a server: its tenant). The schedule treats scopes fairly."""
        return self.request.scope

    @property
    def longest(self) -> int:
        """Return how many tokens a sample may have in the cache. Its last token is never computed, so not cached."""
        return self.prompt_length + self.request.max_tokens - 1

    @property
    def done(self) -> bool:
        return self.prompt_done and all(sequence.stop_reason is not None for sequence in self.sequences)

    @property
    def adapter(self) -> Adapter | None:
        """Return the adapter that its rows have in a pass, if it samples from one."""
        return self.version if isinstance(self.version, Adapter) else None

    @property
    def version_key(self) -> int:
        """Return a key that is unique among versions that are published or in use."""
        return BASE if self.version is None else id(self.version)

    def reusable(self, sequence: Sequence) -> int:
        """Return how many of the sequence's first tokens may come from the cache instead of being computed.

        The last token must be computed, because the next one is drawn from it, and so must rows that are scored, and
        rows whose routes are recorded.
        """
        if self.prompt_done:
            return len(sequence.tokens) - 1
        if self.request.routed_experts:
            return 0
        return min(self.prompt_length, self.scores.first) - 1

    def reached(self, tokens: int, *, reused: bool) -> None:
        """Record that ``tokens`` tokens of the prompt are in the cache now.

        Each prompt token counts once: a preempted sequence that computes its prompt again adds nothing.
        """
        fresh = min(tokens, self.prompt_length) - self.prompt_reached
        if fresh > 0:
            self.prompt_reached += fresh
            self.prompt_reused += fresh if reused else 0

    def piece(self, sequence: Sequence, start: int, stop: int) -> Piece:
        """Return the piece that computes ``sequence.tokens[start:stop]``, with its draws and scores."""
        prompt = self.request.prompt
        return Piece(
            self.adapter,
            prompt[start:stop] if stop <= len(prompt) else np.array(sequence.tokens[start:stop], np.int64),
            start,
            sequence.blocks,
            draws=self._draws(sequence) if stop == len(sequence.tokens) else (),
            scoring=None if self.prompt_done else self.scores.scoring(start, stop),
            shift=self.images.shift(start),
            seen=self.images.seen(start, stop),
            records_routes=self.request.routed_experts,
            state=sequence.state,
        )

    def ahead(self, sequence: Sequence, pending: int = 0, follows: int | None = None) -> Ahead:
        """Return the current state of the sequence, for drawing several tokens in a row.

        pending: how many tokens the device is drawing for it now, as row ``follows`` of that run. The host knows how
        many they are, but not yet which.
        """
        request = self.request
        return Ahead(
            self.adapter,
            0 if pending else sequence.tokens[-1],
            len(sequence.tokens) - 1 + pending,
            sequence.blocks,
            self.draw,
            request.seed,
            sequence.index,
            len(sequence.logprobs) + pending,
            follows,
            self._shift,
            sequence.state,
        )

    def absorb(self, sequence: Sequence, start: int, stop: int, computed: Computed) -> list[Sequence]:
        """Store the results of a piece. Return the sequences created for the other samples at the end of the prompt."""
        if computed.scores is not None:
            self.scores.absorb(start, stop, computed.scores)
        if not all(drawn.finite for drawn in computed.drawn):
            raise _not_finite()
        if computed.routes is not None:
            sequence.keep_routes(start, computed.routes)
        if not computed.drawn:
            return []
        if self.prompt_done:
            sequence.add(computed.drawn[0])
            return []
        self.prompt_done = True
        prompt = list(sequence.tokens)
        fresh = [
            Sequence(self, index, list(prompt), routes=list(sequence.routes), routed=sequence.routed)
            for index in range(1, self.request.num_samples)
        ]
        self.sequences += fresh
        for each, drawn in zip(self.sequences, computed.drawn, strict=True):
            each.add(drawn)
        return fresh

    def absorb_ahead(self, sequence: Sequence, drawn: list[Drawn]) -> int:
        """Store drawn tokens up to the end of the sample. Return how many were stored."""
        if self._all_go_on(sequence, drawn):  # the usual case, made fast because the device may be waiting
            tokens, logprobs, _, _ = zip(*drawn, strict=True)
            sequence.tokens += tokens
            sequence.logprobs += logprobs
            return len(drawn)
        for number, each in enumerate(drawn, start=1):
            if not each.finite:
                raise _not_finite()
            sequence.add(each)
            if sequence.stop_reason is not None:
                return number
        return len(drawn)

    def _all_go_on(self, sequence: Sequence, drawn: list[Drawn]) -> bool:
        """Return whether none of these tokens can end the sample, be meaningless or have more to report."""
        if self.request.params.stop_strings or self.draw.top:
            return False
        if len(sequence.logprobs) + len(drawn) >= self.request.max_tokens:
            return False
        return all(each.finite and each.token not in self.end_tokens for each in drawn)

    def ends(self, sequence: Sequence) -> bool:
        """Return whether the newest token ends the sample."""
        if sequence.tokens[-1] in self.end_tokens:
            return True
        strings, tokenizer = self.request.params.stop_strings, self.tokenizer
        if not strings or tokenizer is None:
            return False
        first = max(self.prompt_length, len(sequence.tokens) - longest_match(strings))
        return holds_one_of(strings, sequence.tokens[first:], tokenizer)

    def progress(self) -> list[Progress]:
        """Return the tokens of each sample that were drawn since the last call, for streaming."""
        return [self._progress(each) for each in self.sequences if each.streamed < len(each.logprobs)]

    def result(self) -> SampleResult:
        sequences = []
        for sequence in self.sequences:
            assert sequence.stop_reason is not None, "every sample of a result has ended"
            tokens, logprobs, top = sequence.generated()
            routes = np.concatenate(sequence.routes) if sequence.routes else None
            sequences.append(SampledSequence(tokens, logprobs, sequence.stop_reason, top, routes))
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
        """Return the draw of the sample's next token; at the end of the prompt, one draw for every sample."""
        samples = [sequence.index] if self.prompt_done else range(self.request.num_samples)
        noise = uniforms(words(self.request.seed), words(*samples), words(len(sequence.logprobs)))
        before = sequence.tokens[self.prompt_length :] if self.request.params.penalises else ()
        penalties = Penalties.for_draw(self.request.params, self.prompt_tokens, before)
        return tuple(replace(self.draw, uniform=number, penalties=penalties) for number in noise.tolist())


def longest_match(strings: Iterable[str]) -> int:
    """Return how many of the newest tokens must be decoded to find any of these strings.

    Every token has at least one byte, so a string spans at most as many tokens as it has bytes.
    """
    return max(len(text.encode()) for text in strings) + _MARGIN


def holds_one_of(strings: Iterable[str], tokens: list[int], tokenizer: Tokenizer) -> bool:
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(string in text for string in strings)


def _not_finite() -> NonFiniteError:
    return NonFiniteError("the model's logits hold NaN or infinity for this prompt and version")
