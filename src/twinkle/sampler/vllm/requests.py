"""Active requests of the vLLM sampler: the tokens that vLLM has generated for each sample so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm import SamplingParams as EngineParams
from vllm.sampling_params import RequestOutputKind

from twinkle.errors import NonFiniteError, TwinkleServerError
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.torch_sampler.jobs import Tokenizer, holds_one_of, longest_match
from twinkle.sampler.types import Progress, SampledSequence, SampleResult, StopReason, TopLogprobs
from twinkle.sampler.validation import CheckedRequest
from twinkle.sampler.vllm.batch_drawing import DrawSettings
from twinkle.sampler.vllm.engine import NewTokens
from twinkle.sampler.vllm.versions import Version


@dataclass(eq=False)
class Sample:
    """One sample of a request. ``pieces``: its tokens as they have arrived, without those after its end."""

    index: int
    pieces: list[NewTokens] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def last_tokens(self, count: int) -> list[int]:
        """Return the newest tokens, at most ``count``."""
        newest: list[int] = []
        for piece in reversed(self.pieces):
            newest = piece.tokens[-(count - len(newest)) :].tolist() + newest
            if len(newest) == count:
                break
        return newest


@dataclass(eq=False)
class Request:
    """A request with its samples.

    ``numbers``: unfinished samples by the engine's number of their generation. ``unscored``: prompt scores were asked
    for and are not computed yet. ``scores``: the prompt scores, once they are computed.
    """

    checked: CheckedRequest
    version: Version | None
    end_tokens: frozenset[int]
    tokenizer: Tokenizer | None
    unscored: bool
    samples: list[Sample] = field(default_factory=list)
    numbers: dict[int, Sample] = field(default_factory=dict)
    scores: SampleResult | None = None
    cached_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.samples += [Sample(index) for index in range(self.checked.num_samples)]

    @property
    def done(self) -> bool:
        return not self.numbers and not self.unscored

    def engine_params(self, sample: Sample) -> EngineParams:
        """Return vLLM's parameters of a sample: greedy for vLLM, with the real settings for our sampler."""
        checked, params = self.checked, self.checked.params
        top = checked.topk_sample_logprobs
        draw = DrawSettings(
            params.temperature,
            params.top_k,
            params.top_p,
            checked.seed,
            sample.index,
            top,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        watched = checked.stream or bool(params.stop_strings)
        return engine_params(draw, checked.max_tokens, self.end_tokens, watched=watched)

    def absorb(self, piece: NewTokens) -> list[Progress]:
        """Store new tokens of a sample and return the events to stream. A finished sample leaves ``numbers``."""
        sample = self.numbers[piece.number]
        if sample.index == 0:
            self.cached_prompt_tokens = max(self.cached_prompt_tokens, piece.cached_prompt_tokens)
        if np.isnan(piece.logprobs).any():
            raise NonFiniteError("the model's logits hold NaN or infinity for this prompt and version")
        fresh = self._until_end(sample, piece)
        if sample.stop_reason is None and piece.finish is not None:
            if piece.finish not in ("stop", "length"):
                raise TwinkleServerError(f"vLLM ended a sample by itself: {piece.finish}")
            sample.stop_reason = "length"
        if sample.stop_reason is not None:
            del self.numbers[piece.number]
        if not self.checked.stream or not len(fresh.tokens):
            return []
        return [Progress(self.checked.request_id, sample.index, *_arrays([fresh]), sample.stop_reason)]

    def result(self) -> SampleResult:
        sequences = []
        for sample in self.samples:
            assert sample.stop_reason is not None, "every sample of a result has ended"
            tokens, logprobs, top = _arrays(sample.pieces)
            sequences.append(SampledSequence(tokens, logprobs, sample.stop_reason, top))
        scores = self.scores or SampleResult([])
        return SampleResult(
            sequences,
            prompt_logprobs=scores.prompt_logprobs,
            topk_prompt_logprobs=scores.topk_prompt_logprobs,
            target_prompt_logprobs=scores.target_prompt_logprobs,
            prompt_alt_tokens=scores.prompt_alt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def _until_end(self, sample: Sample, piece: NewTokens) -> NewTokens:
        """Store the tokens of a piece up to the one that ends the sample, if one does, and return them."""
        lengths = (count for count, token in enumerate(piece.tokens.tolist(), start=1) if token in self.end_tokens)
        ended = next(lengths, None)
        length = len(piece.tokens) if ended is None else ended
        found = self._length_to_stop_string(sample, piece.tokens[:length])
        if found is not None or ended is not None:
            sample.stop_reason = "stop"
        fresh = piece.first(length if found is None else found)
        sample.pieces.append(fresh)
        return fresh

    def _length_to_stop_string(self, sample: Sample, tokens: IntArray) -> int | None:
        """Return how many of these new tokens complete a stop string, or None. vLLM itself sees end tokens only."""
        strings, tokenizer = self.checked.params.stop_strings, self.tokenizer
        if not strings or tokenizer is None:
            return None
        longest = longest_match(strings)
        before = sample.last_tokens(longest)
        for length in range(1, len(tokens) + 1):
            newest = [*before, *tokens[:length].tolist()][-longest:]
            if holds_one_of(strings, newest, tokenizer):
                return length
        return None


def _arrays(pieces: Sequence[NewTokens]) -> tuple[IntArray, FloatArray, TopLogprobs | None]:
    """Join the pieces of a sample."""
    tokens = np.concatenate([np.empty(0, np.int64), *(piece.tokens for piece in pieces)])
    logprobs = np.concatenate([np.empty(0, np.float32), *(piece.logprobs for piece in pieces)])
    tops = [piece.tops for piece in pieces if piece.tops is not None]
    if not tops:
        return tokens, logprobs, None
    ids = np.concatenate([each.token_ids for each in tops])
    return tokens, logprobs, TopLogprobs(ids, np.concatenate([each.logprobs for each in tops]))


def engine_params(draw: DrawSettings, max_tokens: int, end_tokens: frozenset[int], *, watched: bool) -> EngineParams:
    """Return vLLM's parameters. ``watched``: report tokens as they are generated instead of all at the end."""
    return EngineParams(
        temperature=0.0,  # vLLM's own sampling is not used
        # Any penalty makes vLLM keep the generated tokens for us; its number is not used.
        presence_penalty=1.0 if draw.penalises else 0.0,
        max_tokens=max_tokens,
        stop_token_ids=sorted(end_tokens),
        ignore_eos=True,  # end_tokens holds the model's own end tokens where they apply
        logprobs=draw.top,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY,
        extra_args=draw.to_extra_args(),
    )
