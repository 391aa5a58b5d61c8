"""Conversion of input features into requests of an engine, and of an engine's results into responses.

``InputFeature``, ``SamplingParams`` and ``SampleResponse`` are the library's types; an engine has types of its own. The
module does not import torch, because servers use it as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from twinkle.data_format import InputFeature, SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError
from twinkle.model.types import FloatArray, Image
from twinkle.sampler import types as engine_types

__all__ = [
    "CompletionTemplate",
    "as_sampling_params",
    "engine_request",
    "response_of",
    "sequence_of",
]

Pairs = list[list[tuple[int, float]]]


class CompletionTemplate(Protocol):
    """The part of a :class:`~twinkle.template.Template` that decodes a completion and joins it to its prompt."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def concat_input_feature(self, feature: Mapping[str, Any], new_tokens: Sequence[int]) -> dict[str, Any]: ...


def as_sampling_params(given: object) -> SamplingParams:
    """Return sampling parameters: the defaults for None; a mapping is read like the body of a request."""
    if isinstance(given, SamplingParams):
        return given
    if given is None:
        return SamplingParams()
    if isinstance(given, Mapping):
        return SamplingParams.from_dict(given)
    raise InvalidInputError("sampling_params", given, "a SamplingParams, its fields as a mapping, or None")


def engine_request(
    feature: Mapping[str, Any],
    params: SamplingParams,
    index: int,
    version_id: str | None,
    request_id: str,
    *,
    stream: bool = False,
    images: Sequence[Image] = (),
) -> engine_types.SampleRequest:
    """Return the request for input number ``index``. ``images``: those of its prompt.

    A seed is increased by ``index``, so that equal inputs get different samples.
    """
    drawing = engine_types.SamplingParams(
        max_tokens=1 if params.max_tokens == 0 else params.max_tokens,  # engines need ≥ 1; the token is discarded
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=None if params.seed is None else params.seed + index,
        stop_tokens=tuple(params.stop_token_ids),
        stop_strings=tuple(params.stop_strings),
        stop_at_eos=not params.ignore_eos,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    return engine_types.SampleRequest(
        request_id=request_id,
        version_id=version_id,
        prompt=np.asarray(feature["input_ids"], dtype=np.int64),
        params=drawing,
        num_samples=params.num_samples,
        prompt_logprobs=bool(params.prompt_logprobs),
        topk_prompt_logprobs=params.prompt_logprobs or 0,
        topk_sample_logprobs=0 if params.logprobs is None or params.logprobs <= 1 else params.logprobs,
        stream=stream,
        images=images,
        routed_experts=params.routed_experts,
    )


def response_of(
    template: CompletionTemplate,
    feature: Mapping[str, Any],
    result: engine_types.SampleResult,
    params: SamplingParams,
) -> SampleResponse:
    scored = bool(params.prompt_logprobs)
    return SampleResponse(
        sequences=[sequence_of(template, feature, sequence, params) for sequence in result.sequences],
        prompt_token_ids=[int(token) for token in feature["input_ids"]],
        prompt_logprobs=_after_first(result.prompt_logprobs) if scored else None,
        topk_prompt_logprobs=_tops_after_first(result.topk_prompt_logprobs) if scored else None,
    )


def sequence_of(
    template: CompletionTemplate,
    feature: Mapping[str, Any],
    sequence: engine_types.SampledSequence,
    params: SamplingParams,
) -> SampledSequence:
    if params.max_tokens == 0:
        return SampledSequence("length", [], decoded="", new_input_feature=cast("InputFeature", feature))
    tokens = sequence.tokens.tolist()
    logprobs: Pairs | None = None
    if sequence.topk_logprobs is not None:
        logprobs = _pairs(sequence.topk_logprobs)
    elif params.logprobs is not None:
        logprobs = [[pair] for pair in zip(tokens, sequence.logprobs.tolist(), strict=True)]
    grown = template.concat_input_feature(feature, tokens)
    if sequence.routed_experts is not None:
        grown = {**grown, "routed_experts": sequence.routed_experts}
    return SampledSequence(
        stop_reason=sequence.stop_reason,
        tokens=tokens,
        logprobs=logprobs,
        decoded=template.decode(tokens),
        new_input_feature=cast("InputFeature", grown),
        routed_experts=sequence.routed_experts,
    )


def _pairs(top: engine_types.TopLogprobs) -> Pairs:
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    ]


def _after_first(logprobs: FloatArray | None) -> list[float | None]:
    assert logprobs is not None, "they were asked for"
    return [None, *logprobs[1:].tolist()]


def _tops_after_first(top: engine_types.TopLogprobs | None) -> list[list[tuple[int, float]] | None]:
    assert top is not None, "they were asked for"
    return [None, *_pairs(top)[1:]]
