"""The parameters of sampling and its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from twinkle.data_format.input_feature import InputFeature
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.extras import missing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams as VllmSamplingParams

__all__ = ["SampleResponse", "SampledSequence", "SamplingParams"]

StopReason = Literal["length", "stop", "abort", "error"]

# The limit for `generate` if the caller gave none.
_DEFAULT_NEW_TOKENS = 2048


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    ``max_tokens=None``: as many as the context has left (with :meth:`to_transformers` 2048); 0: generate nothing and
    only score the prompt. ``temperature=0``: greedy. ``top_k=-1``: off. ``stop``: a text, several texts, or token ids.
    ``logprobs=k``: report the log-probability of each sampled token (k = 0 or 1) or of the k likeliest tokens.
    ``prompt_logprobs=k``: report those of the prompt's tokens and of the k likeliest at each place (k = 0: none).

    ``min_p``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty`` and ``ignore_eos`` are vLLM's, with
    its formulas: tokens below ``min_p`` times the highest probability are not drawn; penalties lower the logits of
    tokens that occurred; with ``ignore_eos`` the model's end token does not end a sample. Reported log-probabilities
    are those of the model at the temperature, before penalties. ``routed_experts``: return the experts of each token.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    routed_experts: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise InvalidInputError("temperature", self.temperature, "a number ≥ 0")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidInputError("top_p", self.top_p, "a number in (0, 1]")
        if not _is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < float("inf"):
            raise InvalidInputError("repetition_penalty", self.repetition_penalty, "a number > 0")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise InvalidInputError("min_p", self.min_p, "a number in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise InvalidInputError(name, value, "a number in [−2, 2]")
        for name in ("ignore_eos", "routed_experts"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(name, getattr(self, name), "True or False")
        if not _is_int(self.top_k) or (self.top_k != -1 and self.top_k < 1):
            raise InvalidInputError("top_k", self.top_k, "−1 (off) or an integer ≥ 1")
        _require_int("num_samples", self.num_samples, 1)
        for field, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _require_int(field, value, 0)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 0)
        if self.seed is not None and not _is_int(self.seed):
            raise InvalidInputError("seed", self.seed, "an integer or None")
        _check_stop(self.stop)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return [stop for stop in stops if isinstance(stop, str)]

    @property
    def stop_token_ids(self) -> list[int]:
        if self.stop is None or isinstance(self.stop, str):
            return []
        return [stop for stop in self.stop if isinstance(stop, int)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Read parameters from the body of a request. ``max_new_tokens`` is another name for ``max_tokens``."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known and name != "max_new_tokens":
                raise UnknownNameError("sampling parameter", name, [*known, "max_new_tokens"])
        named = {name: value for name, value in values.items() if name in known}
        if "max_new_tokens" in values and named.get("max_tokens") is None:
            named["max_tokens"] = values["max_new_tokens"]
        return cls(**named)

    def to_vllm(self, **overrides: Any) -> "VllmSamplingParams":
        """Return these parameters as vLLM's class. ``overrides``: fields of that class, which take precedence."""
        if self.routed_experts:
            raise UnsupportedError(
                "routed_experts: vLLM has no such parameter; its engine has enable_return_routed_experts"
            )
        try:
            from vllm import SamplingParams as VllmSamplingParams
            from vllm.sampling_params import RequestOutputKind
        except ImportError as error:
            raise missing("vllm", "SamplingParams.to_vllm") from error
        arguments: dict[str, Any] = {
            "n": self.num_samples,
            # vLLM generates at least one token: a caller that only scores the prompt has to discard it.
            "max_tokens": None if self.max_tokens is None else max(self.max_tokens, 1),
            "seed": self.seed,
            "stop": self.stop_strings or None,
            "stop_token_ids": self.stop_token_ids or None,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
        }
        if self.num_samples > 1:  # otherwise samples arrive in pieces, which would have to be joined
            arguments["output_kind"] = RequestOutputKind.FINAL_ONLY
        return VllmSamplingParams(**{**arguments, **overrides})

    def to_transformers(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> dict[str, Any]:
        """Return keyword arguments for ``model.generate``. Stops need the tokenizer, whose end token also stops."""
        if self.seed is not None:
            raise UnsupportedError("seed: model.generate takes none; call transformers.set_seed before it")
        if self.prompt_logprobs is not None:
            raise UnsupportedError("prompt_logprobs: model.generate does not score the prompt")
        for name in ("presence_penalty", "frequency_penalty", "ignore_eos", "routed_experts"):
            if getattr(self, name):
                raise UnsupportedError(f"{name}: model.generate has no such option")
        sampled = self.temperature > 0
        arguments: dict[str, Any] = {
            "do_sample": sampled,
            "max_new_tokens": _DEFAULT_NEW_TOKENS if self.max_tokens is None else self.max_tokens,
            "num_return_sequences": self.num_samples,
            "repetition_penalty": self.repetition_penalty,
        }
        if sampled:
            top_k = 0 if self.top_k == -1 else self.top_k
            arguments |= {"temperature": self.temperature, "top_k": top_k, "top_p": self.top_p}
            if self.min_p:
                arguments["min_p"] = self.min_p
        if self.logprobs is not None:
            arguments |= {"output_logits": True, "return_dict_in_generate": True}
        return arguments | self._transformers_stops(tokenizer)

    def _transformers_stops(self, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
        stops: dict[str, Any] = {}
        if not self.stop_strings and not self.stop_token_ids:
            return stops
        if tokenizer is None:
            raise InvalidInputError("tokenizer", None, "the model's tokenizer, which stops need")
        if self.stop_strings:
            stops |= {"stop_strings": self.stop_strings, "tokenizer": tokenizer}
        if self.stop_token_ids:
            end = tokenizer.eos_token_id
            stops["eos_token_id"] = [*([] if end is None else [end]), *self.stop_token_ids]
        return stops


@dataclass(frozen=True)
class SampledSequence:
    """One continuation of a prompt.

    ``logprobs[i]`` are (token id, log-probability) pairs of position i: only the sampled token, or the likeliest
    tokens, likeliest first. ``new_input_feature`` is the prompt's feature with this continuation appended and labelled.
    ``routed_experts``, if asked for, (T, layers, K): the experts of all tokens but the last. The feature has them, too.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None
    decoded: str | None = None
    new_input_feature: InputFeature | None = None
    routed_experts: Any = None


@dataclass(frozen=True)
class SampleResponse:
    """All continuations of one prompt. Prompt log-probabilities begin with None, because nothing predicts token 0.

    ``weights_version`` names the weights that they were drawn with: ``sync-3`` those of the third ``sync_weights``,
    ``base`` the base model as it was loaded, otherwise an adapter that was handed over (``name-0``, ``name-1``, …) or
    its name or path. None: not known.
    """

    sequences: list[SampledSequence]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    weights_version: str | None = None


def _check_stop(stop: object) -> None:
    if stop is None or isinstance(stop, str):
        return
    if not isinstance(stop, list | tuple) or not (
        all(isinstance(item, str) for item in stop) or all(_is_int(item) for item in stop)
    ):
        raise InvalidInputError("stop", stop, "a text, a list of texts, or a list of token ids")


def _require_int(field: str, value: object, least: int) -> None:
    if not _is_int(value) or not isinstance(value, int) or value < least:
        raise InvalidInputError(field, value, f"an integer ≥ {least}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
