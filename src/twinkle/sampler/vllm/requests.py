"""Active requests of the vLLM sampler: the tokens that vLLM has generated for each sample so far."""

from dataclasses import dataclass, field

import numpy as np
from vllm import SamplingParams as EngineParams
from vllm.sampling_params import RequestOutputKind

from twinkle.errors import NonFiniteError, TwinkleServerError
from twinkle.sampler.torch_sampler.jobs import Tokenizer, holds_one_of, longest_match
from twinkle.sampler.types import Progress, SampledSequence, SampleResult, StopReason, TopLogprobs
from twinkle.sampler.validation import CheckedRequest
from twinkle.sampler.vllm import message
from twinkle.sampler.vllm.engine import NewTokens
from twinkle.sampler.vllm.message import Told
from twinkle.sampler.vllm.processor import DrawSettings
from twinkle.sampler.vllm.versions import Version


@dataclass(eq=False)
class Sample:
    index: int
    told: list[Told] = field(default_factory=list)
    stop_reason: StopReason | None = None


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
        """Return vLLM's parameters of a sample: greedy for vLLM, with the real settings for our processor."""
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
        before = len(sample.told)
        for reported in piece.tokens:
            told = message.read(reported.token, reported.logprobs, self.checked.topk_sample_logprobs)
            if not told.finite:
                raise NonFiniteError("the model's logits hold NaN or infinity for this prompt and version")
            sample.told.append(told)
            if self._ends(sample):
                sample.stop_reason = "stop"
                break
        if sample.stop_reason is None and piece.finish is not None:
            if piece.finish not in ("stop", "length"):
                raise TwinkleServerError(f"vLLM ended a sample by itself: {piece.finish}")
            sample.stop_reason = "length"
        if sample.stop_reason is not None:
            del self.numbers[piece.number]
        fresh = sample.told[before:]
        if not self.checked.stream or not fresh:
            return []
        return [Progress(self.checked.request_id, sample.index, *self._arrays(fresh), sample.stop_reason)]

    def result(self) -> SampleResult:
        sequences = []
        for sample in self.samples:
            assert sample.stop_reason is not None, "every sample of a result has ended"
            tokens, logprobs, top = self._arrays(sample.told)
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

    def _ends(self, sample: Sample) -> bool:
        """Return whether the newest token ends the sample. vLLM itself stops at end tokens, not at stop strings."""
        if sample.told[-1].token in self.end_tokens:
            return True
        strings, tokenizer = self.checked.params.stop_strings, self.tokenizer
        if not strings or tokenizer is None:
            return False
        return holds_one_of(strings, [told.token for told in sample.told[-longest_match(strings) :]], tokenizer)

    def _arrays(self, told: list[Told]) -> tuple["np.ndarray", "np.ndarray", TopLogprobs | None]:
        tokens = np.array([each.token for each in told], np.int64)
        logprobs = np.array([each.logprob for each in told], np.float32)
        if not self.checked.topk_sample_logprobs:
            return tokens, logprobs, None
        shape = (len(told), self.checked.topk_sample_logprobs)
        entries = np.array([each.top for each in told], np.float64).reshape(*shape, 2)
        return tokens, logprobs, TopLogprobs(entries[..., 0].astype(np.int64), entries[..., 1].astype(np.float32))


def engine_params(draw: DrawSettings, max_tokens: int, end_tokens: frozenset[int], *, watched: bool) -> EngineParams:
    """Return vLLM's parameters. ``watched``: report tokens as they are generated instead of all at the end."""
    return EngineParams(
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=sorted(end_tokens),
        ignore_eos=True,  # end_tokens holds the model's own end tokens where they apply
        logprobs=draw.top + message.OVERHEAD,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY,
        extra_args=draw.to_extra_args(),
    )
