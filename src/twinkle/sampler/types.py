"""The types of sampling: a sampler's requests and results, as plain dataclasses over numpy, without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from twinkle.errors import TwinkleError
from twinkle.model.types import FloatArray, Image, IntArray, RouteArray

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    ``max_tokens=None``: as many as the context has left. ``temperature=0``: greedy. ``top_k=-1``: off. ``seed=None``: a
    random one. Generation ends after the first token of ``stop_tokens``, after the token that completes one of
    ``stop_strings``, and, with ``stop_at_eos``, after an end token of the model or its tokenizer; that token is part of
    the result.

    ``min_p``: tokens with less than this fraction of the likeliest token's probability are never drawn. The penalties
    lower the logits of tokens that have occurred, as vLLM does it: ``repetition_penalty`` divides positive logits and
    multiplies negative ones, for tokens of the prompt and generated ones; ``frequency_penalty`` is subtracted for each
    time that a token was generated, ``presence_penalty`` once. They change which token is drawn. The log-probabilities
    of the result are those of the model, without penalties.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    stop_at_eos: bool = True
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalises(self) -> bool:
        """Return whether a draw depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class SampleRequest:
    """A request for ``num_samples`` independent continuations of one prompt (T,). ``version_id=None``: the base model.

    A request may also ask for scores of the prompt's tokens after the first: the log-probability of each
    (``prompt_logprobs``), the k likeliest tokens at each position (``topk_prompt_logprobs``), the log-probabilities of
    given tokens (``target_prompt_logprobs``, (T − 1, K), −1 for an empty cell), and k tokens drawn at each position at
    the request's temperature (``prompt_alt_tokens``). These log-probabilities are raw, that is, at temperature 1.
    ``prompt_logprobs_last_n`` limits the first two to the last n tokens. ``topk_sample_logprobs``: how many of the
    likeliest tokens are reported for each generated token. ``stream``: tokens are also reported as they are drawn, see
    :class:`Progress`. Requests with different ``scope`` never share cached prompts. ``images``: those of the prompt, in
    their order; at their places ``prompt`` has the model's image token, as :class:`~twinkle.model.types.Datum` has.
    ``routed_experts``: return the experts of each token, which costs the prompt's part of the cache.
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
    images: Sequence[Image] = ()
    routed_experts: bool = False


@dataclass(frozen=True)
class TopLogprobs:
    """The k likeliest tokens of each position, likeliest first: token_ids and logprobs (T, k).

    An empty cell (position 0 of a prompt, a position that was not scored) is token 0 with log-probability −∞.
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
    """One generated sample of N tokens.

    ``logprobs`` (N,) are those of the tempered distribution over the whole vocabulary, without penalties; at
    temperature 0, of the untempered one. ``topk_logprobs``, if asked for, holds the likeliest tokens of that
    distribution at each of the N positions. ``routed_experts``, if asked for, are (T, layers, K) for prompt and sample
    together; T is one less than their tokens, because the last one never went through the model.
    """

    tokens: IntArray
    logprobs: FloatArray
    stop_reason: StopReason
    topk_logprobs: TopLogprobs | None = None
    routed_experts: RouteArray | None = None


@dataclass(frozen=True)
class SampleResult:
    """The samples of one request and the scores of its prompt.

    ``prompt_logprobs`` (T,) are NaN at position 0, whose token nothing predicts, and at positions that were not scored.
    ``target_prompt_logprobs`` (T − 1, K) are 0 for empty cells and positions that were not scored.
    ``cached_prompt_tokens``: how many of the prompt's tokens were found in the cache, computed for an earlier request.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: FloatArray | None = None
    topk_prompt_logprobs: TopLogprobs | None = None
    target_prompt_logprobs: FloatArray | None = None
    prompt_alt_tokens: DrawnTokens | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True)
class SampleFailure:
    """The error of one request that failed. Other requests are not affected."""

    error: TwinkleError


@dataclass(frozen=True)
class Finished:
    """The end of a request, with its result or its failure. The result of a streamed request holds all tokens again."""

    request_id: str
    outcome: SampleResult | SampleFailure


@dataclass(frozen=True)
class Progress:
    """New tokens of sample number ``index`` of a streamed request. ``stop_reason`` is set in the sample's last one."""

    request_id: str
    index: int
    tokens: IntArray
    logprobs: FloatArray
    topk_logprobs: TopLogprobs | None = None
    stop_reason: StopReason | None = None


@dataclass(frozen=True)
class SamplerNumbers:
    """Counters of a sampler since it was built. A decode step draws one token for each of its sequences."""

    decode_steps: int
    decoded_tokens: int  # drawn in these steps, including those that were drawn in vain behind the end of a sample


@runtime_checkable
class CountsSteps(Protocol):
    """A sampler that counts its decode steps."""

    def numbers(self) -> SamplerNumbers:
        """Return the counters. Called in any thread."""
        ...


@runtime_checkable
class EndsTurns(Protocol):
    """A sampler that can end a turn early, because other work is to have the device next."""

    def end_turns_when(self, other_work_is_next: Callable[[], bool]) -> None:
        """Have ``step`` call this function between its passes, and return soon after the function returns True."""
        ...


@runtime_checkable
class TakesFiles(Protocol):
    """A sampler that is told where the files of its published versions are, so that it need not keep all in memory."""

    def version_saved(self, version_id: str, directory: str) -> None:
        """Note that the weights of a version are in this directory too. Unknown ids are ignored."""
        ...


class Sampler(Protocol):
    """An engine that generates with a base model and many versions. All methods are called from one thread.

    A version is an immutable copy of an adapter's weights or, for a model that is trained in all parameters, of all
    weights. ``step`` gives the device to the sampler for a short turn.
    """

    def publish(self, version_id: str, adapter_id: str) -> None:
        """Freeze the adapter's present weights as a new version."""
        ...

    def load_version(self, version_id: str, directory: str) -> None:
        """Read a version from a directory: an adapter in PEFT's format, or all weights in Hugging Face's."""
        ...

    def retire(self, version_id: str) -> None:
        """Drop a version once the requests that use it are finished. Unknown ids are ignored."""
        ...

    def version_ids(self) -> list[str]: ...

    def submit(self, request: SampleRequest) -> None:
        """Accept a request. Raise UserError if it cannot be served as it is."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request whose result is no longer needed. Unknown ids are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether requests are unfinished, so that ``step`` has something to do."""
        ...

    def step(self) -> list[Finished | Progress]:
        """Work for a short turn, about a tenth of a second. Return finished requests and streamed tokens."""
        ...
