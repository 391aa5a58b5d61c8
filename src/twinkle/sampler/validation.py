"""Checks of a request before it joins a batch. Every error names the field and the values that are allowed there."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.types import Image, IntArray, RoutingSpec, VisionSpec
from twinkle.model.vision.checks import check_images
from twinkle.sampler.noise import fresh_seed
from twinkle.sampler.types import SampleRequest, SamplingParams

MAX_SAMPLES = 1024
MAX_WIDTH = 1024  # target, drawn or likeliest tokens at one position
_HARDEST = 1e3  # the highest repetition penalty: times any logit it is still a finite number
MAX_CELLS = 2**24  # positions times width: the most cells that one option may add to a result


@dataclass(frozen=True)
class Limits:
    """The limits that the model, the cache and the tokenizer of a sampler set for a request."""

    vocab_size: int
    context: int  # tokens of prompt and completion together
    cache_tokens: int
    stop_strings: bool  # whether there is a tokenizer to read them with
    vision: VisionSpec | None = None  # what the model wants of images; None: images are refused
    routing: RoutingSpec | None = None  # what routes to experts look like; None: they are refused

    @property
    def tokens(self) -> int:
        return min(self.context, self.cache_tokens)


@dataclass(frozen=True)
class CheckedRequest:
    """A request that passed all checks. Defaults are filled in: ``max_tokens`` and ``seed`` are numbers."""

    request_id: str
    prompt: IntArray
    params: SamplingParams
    max_tokens: int
    seed: int
    num_samples: int
    prompt_logprobs: bool
    prompt_logprobs_last_n: int | None
    topk_prompt_logprobs: int
    target_prompt_logprobs: IntArray | None
    prompt_alt_tokens: int
    topk_sample_logprobs: int
    stream: bool
    scope: str
    images: tuple[Image, ...]
    routed_experts: bool


def check_request(request: SampleRequest, limits: Limits) -> CheckedRequest:
    if not isinstance(request.request_id, str):
        raise InvalidInputError("request_id", request.request_id, "a string")
    if not _is_text(request.scope):
        raise InvalidInputError("scope", request.scope, "a string without unpaired surrogates")
    prompt = _prompt(request.prompt, limits)
    images = check_images(request.images, prompt, limits.vision, field="images", reader="sampler")
    params = request.params
    _check_params(params, limits)
    _require_int("num_samples", request.num_samples, 1, MAX_SAMPLES)
    max_tokens = _max_tokens(params.max_tokens, len(prompt), limits)
    widest = min(MAX_WIDTH, limits.vocab_size)
    _check_width("topk_prompt_logprobs", request.topk_prompt_logprobs, len(prompt), widest)
    _check_width("prompt_alt_tokens", request.prompt_alt_tokens, len(prompt), MAX_WIDTH)
    _check_width("topk_sample_logprobs", request.topk_sample_logprobs, request.num_samples * max_tokens, widest)
    routed_experts = _flag("routed_experts", request.routed_experts)
    if routed_experts and limits.routing is None:
        raise UnsupportedError(
            "routed_experts: this sampler returns no routes to experts; the torch sampler does, for models with "
            "routers whose choice it can record"
        )
    if routed_experts and limits.routing is not None:
        most = MAX_CELLS // (limits.routing.layers * limits.routing.chosen)
        tokens = request.num_samples * (len(prompt) + max_tokens)
        if tokens > most:
            allowed = f"at most {most} in num_samples × (prompt + max_tokens), of which each has its routes"
            raise InvalidInputError("routed_experts", f"{tokens} tokens", allowed)
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and (not _is_int(last_n) or last_n < 0):
        raise InvalidInputError("prompt_logprobs_last_n", last_n, "an integer ≥ 0, or None for the whole prompt")
    return CheckedRequest(
        request_id=request.request_id,
        prompt=prompt,
        params=params,
        max_tokens=max_tokens,
        seed=fresh_seed() if params.seed is None else params.seed,
        num_samples=request.num_samples,
        prompt_logprobs=_flag("prompt_logprobs", request.prompt_logprobs),
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        target_prompt_logprobs=_targets(request.target_prompt_logprobs, len(prompt), limits),
        prompt_alt_tokens=request.prompt_alt_tokens,
        topk_sample_logprobs=request.topk_sample_logprobs,
        stream=_flag("stream", request.stream),
        scope=request.scope,
        images=images,
        routed_experts=routed_experts,
    )


def _prompt(values: IntArray, limits: Limits) -> IntArray:
    try:
        prompt = np.asarray(values)
    except (TypeError, ValueError) as error:  # for example ragged lists
        raise InvalidInputError("prompt", values, "an array of token ids") from error
    if prompt.ndim != 1 or prompt.size == 0:
        raise InvalidInputError("prompt", f"shape {prompt.shape}", "(T,) with T ≥ 1")
    if prompt.dtype.kind not in "iu":
        raise InvalidInputError("prompt", f"dtype {prompt.dtype}", "an integer array")
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        worst = prompt.min() if prompt.min() < 0 else prompt.max()
        raise InvalidInputError("prompt", int(worst), f"token ids in [0, {limits.vocab_size})")
    if len(prompt) >= limits.tokens:
        raise InvalidInputError("prompt", f"{len(prompt)} tokens", f"fewer than {limits.tokens} ({_reason(limits)})")
    return prompt.astype(np.int64)  # a copy, because the caller may change the original


def _targets(values: IntArray | None, prompt: int, limits: Limits) -> IntArray | None:
    if values is None:
        return None
    field, shape = "target_prompt_logprobs", f"({prompt - 1}, K) after a prompt of {prompt} tokens"
    try:
        targets = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(field, values, f"an array of token ids, {shape}") from error
    if targets.ndim != 2 or len(targets) != prompt - 1:
        raise InvalidInputError(field, f"shape {targets.shape}", shape)
    if targets.dtype.kind not in "iu":
        raise InvalidInputError(field, f"dtype {targets.dtype}", "an integer array")
    _check_width(field, targets.shape[1], prompt, MAX_WIDTH)
    wrong = targets[(targets < -1) | (targets >= limits.vocab_size)]
    if wrong.size:
        raise InvalidInputError(field, int(wrong[0]), f"token ids in [0, {limits.vocab_size}), or -1 for none")
    return targets.astype(np.int64)


def _max_tokens(wanted: int | None, prompt: int, limits: Limits) -> int:
    left = limits.tokens - prompt
    if wanted is None:
        return left
    if not _is_int(wanted) or not 1 <= wanted <= left:
        allowed = f"an integer in [1, {left}] after a prompt of {prompt} tokens ({_reason(limits)}), or None"
        raise InvalidInputError("max_tokens", wanted, allowed)
    return wanted


def _reason(limits: Limits) -> str:
    if limits.context <= limits.cache_tokens:
        return f"the context holds {limits.context}"
    return f"the cache holds {limits.cache_tokens}"


def _check_params(params: SamplingParams, limits: Limits) -> None:
    if not _is_number(params.temperature) or params.temperature < 0:
        raise InvalidInputError("temperature", params.temperature, "a finite number ≥ 0")
    if not _is_number(params.top_p) or not 0 < params.top_p <= 1:
        raise InvalidInputError("top_p", params.top_p, "a number in (0, 1]")
    if not _is_int(params.top_k) or not -1 <= params.top_k < 2**31:
        raise InvalidInputError("top_k", params.top_k, "an integer in [1, 2**31), or -1 (off)")
    if not _is_number(params.min_p) or not 0 <= params.min_p <= 1:
        raise InvalidInputError("min_p", params.min_p, "a number in [0, 1]")
    if not _is_number(params.repetition_penalty) or not 1 / _HARDEST <= params.repetition_penalty <= _HARDEST:
        allowed = f"a number in [{1 / _HARDEST:g}, {_HARDEST:g}]"
        raise InvalidInputError("repetition_penalty", params.repetition_penalty, allowed)
    for name in ("presence_penalty", "frequency_penalty"):
        value = vars(params)[name]
        if not _is_number(value) or not -2 <= value <= 2:
            raise InvalidInputError(name, value, "a number in [−2, 2]")
    if params.seed is not None and (not _is_int(params.seed) or not -(2**63) <= params.seed < 2**64):
        raise InvalidInputError("seed", params.seed, "a 64-bit integer or None")
    for token in _listed("stop_tokens", params.stop_tokens):
        if not _is_int(token) or not 0 <= token < limits.vocab_size:
            raise InvalidInputError("stop_tokens", token, f"token ids in [0, {limits.vocab_size})")
    for text in _listed("stop_strings", params.stop_strings):
        if not _is_text(text) or not text:
            raise InvalidInputError("stop_strings", text, "strings that are not empty and have no unpaired surrogates")
        if not limits.stop_strings:
            raise InvalidInputError("stop_strings", text, "none: this sampler has no tokenizer")


def _listed(field: str, values: Iterable[object]) -> list[object]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidInputError(field, values, "a tuple")
    return list(values)


def _check_width(field: str, width: int, positions: int, widest: int) -> None:
    """Check the number of tokens asked for at each position, and the total size that results from it."""
    _require_int(field, width, 0, widest)
    if width * positions > MAX_CELLS:
        raise InvalidInputError(field, width, f"at most {MAX_CELLS // positions} at each of {positions} tokens")


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError(field, value, "True or False")
    return value


def _require_int(field: str, value: object, low: int, high: int) -> None:
    if not _is_int(value) or not low <= value <= high:
        raise InvalidInputError(field, value, f"an integer in [{low}, {high}]")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite number. An int too large for a float is refused."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether the value is a string that can be encoded: JSON may carry a lone surrogate, which cannot."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
