"""Samples on the wire: results become protobuf."""

import numpy as np

from twinkle.sampler.types import SampledSequence, SampleResult, TopLogprobs
from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import tinker_pb2 as pb

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
# How the protocol writes a cell of a top-k table that holds nothing.
_NO_TOKEN = 0
_NO_LOGPROB = -99999.0


def encode_sample_result(result: SampleResult) -> Outcome:
    response = pb.SampleResponse(sequences=[_sequence(sequence) for sequence in result.sequences])
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        response.topk_prompt_logprobs.CopyFrom(_top_logprobs(result.topk_prompt_logprobs))
    return Outcome(Encoding.PROTOBUF, response.SerializeToString())


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
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
