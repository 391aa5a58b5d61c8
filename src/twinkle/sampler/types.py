"""The nouns of sampling: what goes into a sampler and what comes out. Plain dataclasses over numpy, no torch."""

from dataclasses import dataclass
from typing import Literal, Protocol

from twinkle.errors import TwinkleError
from twinkle.model.types import FloatArray, IntArray

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    ``max_tokens=None``: what is left of the context. ``temperature=0``: greedy. ``top_k=-1``: off. ``seed=None``: a
    fresh one. Generation ends after the first token of ``stop_tokens``, after the token that completes one of
    ``stop_strings``, and, with ``stop_at_eos``, after the model's own end token; that token is part of the result.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    stop_at_eos: bool = True


@dataclass(frozen=True)
class SampleRequest:
    """``num_samples`` independent continuations of one prompt (T,). ``version_id=None`` is the base model.

    Of the prompt's tokens after the first may be asked: the log-probability of each (``prompt_logprobs``), the k
    likeliest at each position (``topk_prompt_logprobs``), the log-probabilities of named tokens
    (``target_prompt_logprobs``, (T − 1, K), −1 where nothing is named), and k tokens drawn at each position, at the
    request's temperature (``prompt_alt_tokens``). All log-probabilities are raw, as at temperature 1.
    ``prompt_logprobs_last_n``: of the first two, only those of the last n tokens. ``stream``: tokens are handed over as
    they come, see :class:`Progress`. Requests of different ``scope`` never share what was computed of a prompt.
    """

    request_id: str
    version_id: str | None
    prompt: IntArray
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    target_prompt_logprobs: IntArray | None = None
    prompt_alt_tokens: int = 0
    topk_sample_logprobs: int = 0
    stream: bool = False
    scope: str = ""


@dataclass(frozen=True)
class TopLogprobs:
    """The k likeliest tokens of each position, likeliest first: token_ids and logprobs (T, k).

    A cell that holds nothing (position 0 of a prompt, what is not scored) is token 0 with log-probability −∞.
    """

    token_ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True)
class DrawnTokens:
    """k tokens drawn at each position of a prompt after the first: tokens and logprobs (T − 1, k)."""

    tokens: IntArray
    logprobs: FloatArray


@dataclass(frozen=True)
class SampledSequence:
    """tokens (N,), the log-probability of each under the tempered distribution over the whole vocabulary, and, where
    asked for, the likeliest tokens of that distribution at each of the N positions."""

    tokens: IntArray
    logprobs: FloatArray
    stop_reason: StopReason
    topk_logprobs: TopLogprobs | None = None


@dataclass(frozen=True)
class SampleResult:
    """``prompt_logprobs`` (T,) are NaN at position 0, where nothing predicts the token, and where nothing was scored.

    ``target_prompt_logprobs`` (T − 1, K) are 0 where nothing was named or scored. ``cached_prompt_tokens``: how many of
    the prompt's tokens were found in the cache, computed for an earlier request.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: FloatArray | None = None
    topk_prompt_logprobs: TopLogprobs | None = None
    target_prompt_logprobs: FloatArray | None = None
    prompt_alt_tokens: DrawnTokens | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True)
class SampleFailure:
    """Why one request failed; no other request noticed."""

    error: TwinkleError


@dataclass(frozen=True)
class Finished:
    """A request that is done, in whatever way. The result of a streamed one holds everything again."""

    request_id: str
    outcome: SampleResult | SampleFailure


@dataclass(frozen=True)
class Progress:
    """New tokens of sample number ``index`` of a streamed request, in order; ``stop_reason`` with its last ones."""

    request_id: str
    index: int
    tokens: IntArray
    logprobs: FloatArray
    topk_logprobs: TopLogprobs | None = None
    stop_reason: StopReason | None = None


class Sampler(Protocol):
    """One engine that generates with many adapter versions. Used from one thread.

    A version is an immutable copy of an adapter's weights; ``step`` gives the device to the sampler for a short turn.
    """

    def publish(self, version_id: str, adapter_id: str) -> None:
        """Freeze the adapter's weights as they are now under a new name."""
        ...

    def load_version(self, version_id: str, directory: str) -> None:
        """Read a version from a directory in PEFT's format."""
        ...

    def retire(self, version_id: str) -> None:
        """Forget a version. Requests that use it are finished first; unknown names are ignored."""
        ...

    def version_ids(self) -> list[str]: ...

    def submit(self, request: SampleRequest) -> None:
        """Take in a request; raises UserError for what can never be done."""
        ...

    def cancel(self, request_id: str) -> None:
        """Drop a request that nobody waits for; unknown ids are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""
        ...

    def step(self) -> list[Finished | Progress]:
        """Work for a short turn (about a tenth of a second at most) and hand over what is done or streamed."""
        ...
