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
    """``num_samples`` independent continuations of one prompt (T,). ``version_id=None`` is the base model."""

    request_id: str
    version_id: str | None
    prompt: IntArray
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True)
class SampledSequence:
    """tokens (N,) and the log-probability of each under the tempered distribution over the whole vocabulary."""

    tokens: IntArray
    logprobs: FloatArray
    stop_reason: StopReason


@dataclass(frozen=True)
class TopLogprobs:
    """The k likeliest tokens of each position, likeliest first: token_ids and logprobs (T, k)."""

    token_ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True)
class SampleResult:
    """``prompt_logprobs`` (T,) are raw (temperature 1), NaN at position 0, where nothing predicts the token."""

    sequences: list[SampledSequence]
    prompt_logprobs: FloatArray | None = None
    topk_prompt_logprobs: TopLogprobs | None = None


@dataclass(frozen=True)
class SampleFailure:
    """Why one request failed; no other request noticed."""

    error: TwinkleError


@dataclass(frozen=True)
class Finished:
    """A request that is done, in whatever way."""

    request_id: str
    outcome: SampleResult | SampleFailure


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

    def step(self) -> list[Finished]:
        """Work for a short turn (about a tenth of a second at most) and hand over what is done."""
        ...
