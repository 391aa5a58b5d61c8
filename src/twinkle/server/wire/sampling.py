"""Samples on the wire: results become protobuf."""

from collections.abc import Callable

import numpy as np

from twinkle.model.types import FloatArray
from twinkle.sampler.types import DrawnTokens, SampledSequence, SampleResult, TopLogprobs
from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.tensors import CsrLayout, encode_csr, encode_tensor

Encode = Callable[[SampleResult], Outcome]

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
# How the protocol writes a cell of a top-k table that holds nothing.
_NO_TOKEN = 0
_NO_LOGPROB = -99999.0


def encode_sample_result(result: SampleResult, targets: CsrLayout | None = None) -> Outcome:
    """``targets``: the cells that the request listed in its target_prompt_logprobs, None where that was dense."""
    response = pb.SampleResponse(
        sequences=[_sequence(sequence) for sequence in result.sequences],
        prompt_cache_hit_tokens=result.cached_prompt_tokens,
    )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        response.topk_prompt_logprobs.CopyFrom(_top_logprobs(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        response.target_prompt_logprobs.CopyFrom(_targets(result.target_prompt_logprobs, targets))
    if result.prompt_alt_tokens is not None:
        response.prompt_alt_tokens.CopyFrom(_drawn(result.prompt_alt_tokens))
    return Outcome(Encoding.PROTOBUF, response.SerializeToString())


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk_logprobs is None else _top_logprobs(sequence.topk_logprobs),
    )


def _top_logprobs(top: TopLogprobs) -> pb.TopkLogprobs:
    """Cells whose log-probability is NaN or infinite, as in the row of position 0, are sent as empty."""
    length, k = top.token_ids.shape
    given = np.isfinite(top.logprobs)
    return pb.TopkLogprobs(
        token_ids=np.where(given, top.token_ids, _NO_TOKEN).astype("<i4").tobytes(),
        logprobs=np.where(given, top.logprobs, _NO_LOGPROB).astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _targets(logprobs: FloatArray, layout: CsrLayout | None) -> pb.Tensor:
    if layout is None:
        return encode_tensor(logprobs, pb.DTYPE_FLOAT32)
    return encode_csr(layout.listed(logprobs), layout, pb.DTYPE_FLOAT32)


def _drawn(drawn: DrawnTokens) -> pb.PromptAltTokens:
    return pb.PromptAltTokens(
        tokens=encode_tensor(drawn.tokens, pb.DTYPE_INT64),
        logprobs=encode_tensor(drawn.logprobs, pb.DTYPE_FLOAT32),
    )
