"""Samples on the wire: JSON requests become requests of the sampler, and its results become protobuf.

Requests are read as strictly as in :mod:`twinkle.server.wire.requests`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.images import SentImages
from twinkle.model.csr import Csr
from twinkle.model.types import Image, IntArray
from twinkle.sampler.types import DrawnTokens, SampledSequence, SampleRequest, SampleResult, SamplingParams, TopLogprobs
from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.fields import Id, Number, Parameters, Request, Seed, Stops, Text, parse, short
from twinkle.server.wire.image_files import ImageAllowance
from twinkle.server.wire.model_input import ModelInput, read_json
from twinkle.server.wire.tensors import checked_csr, encode_csr, encode_tensor, moved_left, widest_row

MAX_SAMPLES = 1024
# The JSON parser holds the interpreter lock, and numbers take it 20 times as long as the base64 of images. A body may
# have as many commas as a prompt of half a million tokens with as many target tokens needs; base64 has none.
_MAX_COMMAS = 2**21
_MAX_RETRIEVED = 2**16
_MAX_TARGETS = 2**22  # cells of a request's target_prompt_logprobs as the sampler reads them: 32 MiB

Encode = Callable[[SampleResult], Outcome]

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
# The protocol's values for an empty cell of a top-k table.
_NO_TOKEN = 0
_NO_LOGPROB = -99999.0
Count = Annotated[int, Field(ge=0, lt=2**31)]
Counts = Annotated[list[Count], Field(fail_fast=True)]


class CreateSamplingSessionRequest(Request):
    """A request for a sampling session. ``model_path`` takes precedence over ``base_model``."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


# --- futures ----------------------------------------------------------------------------------------------------------


class RetrieveFutureRequest(Request):
    request_id: Id
    allow_metadata_only: bool = False


class FuturesTarget(Request):
    """One client of a sampling session: number 0 is the original client, its clones have other numbers."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Number = 0


class RetrieveFuturesRequest(Request):
    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(default_factory=list, max_length=_MAX_RETRIEVED, fail_fast=True)]


class CancelFutureRequest(Request):
    request_id: Id


# --- samples ----------------------------------------------------------------------------------------------------------


class SamplingConfig(Parameters):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: Stops = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def params(self) -> SamplingParams:
        """Return the parameters as the sampler's.

        With an empty list as ``stop`` only the maximum length ends a sequence; otherwise the stops do, and the model's
        own end tokens, too. InvalidInputError if ``top_k`` is 0.
        """
        if self.top_k == 0:
            raise InvalidInputError("sampling_params.top_k", 0, "-1 (off) or at least 1")
        stops = self.stop or []
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop_tokens=tuple(stop for stop in stops if isinstance(stop, int)),
            stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_at_eos=self.stop != [],
        )


class TargetTokens(Request):
    """Token ids as a TensorData, with a row for each token of the prompt after the first.

    A cell that is −1, or that a sparse tensor does not list, holds no token.
    """

    data: Annotated[list[Annotated[int, Field(ge=-1, lt=2**31)]], Field(fail_fast=True)]
    dtype: Literal["int64"]
    shape: Annotated[list[Count], Field(min_length=2, max_length=2)]
    sparse_crow_indices: Counts | None = None
    sparse_col_indices: Counts | None = None

    def sparse(self) -> Csr | None:
        """Return the tensor as a sparse matrix; None if it is dense."""
        if self.sparse_crow_indices is None and self.sparse_col_indices is None:
            return None
        rows, columns = self.shape
        crow, col = (np.array(each or [], np.int64) for each in (self.sparse_crow_indices, self.sparse_col_indices))
        return checked_csr(rows, columns, crow, col, np.array(self.data, np.int64), "target_prompt_logprobs")

    def tokens(self, sparse: Csr | None) -> IntArray:
        """Return the token ids as an array (rows, K), −1 where there is none.

        The listed cells of a sparse tensor are moved to the left, so that K is the length of its longest row.
        """
        rows, columns = self.shape[0], self.shape[1] if sparse is None else widest_row(sparse)
        if rows * columns > _MAX_TARGETS:
            raise InvalidInputError("target_prompt_logprobs", f"{rows} × {columns} cells", f"at most {_MAX_TARGETS}")
        values = np.array(self.data, np.int64) if sparse is None else sparse.values
        if values.max(initial=-1) < 0:
            raise InvalidInputError("target_prompt_logprobs", "no token", "a token id at least")
        if sparse is not None:
            return moved_left(sparse, -1)
        if len(values) != rows * columns:
            raise InvalidInputError("target_prompt_logprobs.data", f"{len(values)} values", f"{rows * columns}")
        return values.reshape(rows, columns)


class AsampleRequest(Request):
    """A request for samples. ``seq_id`` None: the server numbers the request."""

    sampling_session_id: Id
    seq_id: Number | None = None
    prompt: ModelInput
    sampling_params: SamplingConfig
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count | None = None
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: Count | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    # Accepted and ignored: it asks for numbers that only one loss of the hosted service reads.
    record_stability_info: bool | None = None
    # Refused unless they are null: the sampling session determines them.
    base_model: Any = None
    model_path: Any = None
    type: Literal["sample"] = "sample"


def parse_sample(body: bytes) -> AsampleRequest:
    """Parse a request for samples. A body with more numbers than any request needs is refused before that."""
    if body.count(b",") > _MAX_COMMAS:
        raise BodyTooLargeError(_MAX_COMMAS, "commas")
    return parse(AsampleRequest, body)


def to_sample_request(
    request: AsampleRequest, version_id: str | None, left: ImageAllowance | None = None
) -> tuple[SampleRequest, SentImages, Encode]:
    """Return the sampler's request, the images that are not in its prompt yet, and a function to encode its result.

    If target_prompt_logprobs are sparse in the request, they are also sparse in the encoded result. ``version_id``: the
    version that the sampling session samples from; None: the base model. The request id is that of a request with a
    number; for one without, the caller sets it. ``left``: the images that the request may have.
    """
    for field in ("base_model", "model_path"):
        if vars(request)[field] is not None:
            raise UnsupportedError(f"{field}: got {short(vars(request)[field])}, which this server does not offer")
    prompt, images = read_json(request.prompt, "prompt.chunks", left or ImageAllowance())
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not request.prompt_logprobs:
        raise InvalidInputError("prompt_logprobs_last_n", last_n, "null without prompt_logprobs")
    if not images:
        _check_last_n(last_n, len(prompt))
    targets = request.target_prompt_logprobs
    sparse = None if targets is None else targets.sparse()
    sample = SampleRequest(
        request_id=f"{request.sampling_session_id}:{request.seq_id}",
        version_id=version_id,
        prompt=prompt,
        params=request.sampling_params.params(),
        num_samples=request.num_samples,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        target_prompt_logprobs=None if targets is None else targets.tokens(sparse),
        prompt_alt_tokens=request.prompt_alt_tokens_k or 0,
        topk_sample_logprobs=request.topk_sample_logprobs or 0,
    )
    return sample, images, partial(encode_sample_result, targets=sparse)


def with_images(request: SampleRequest, prompt: IntArray, images: Sequence[Image]) -> SampleRequest:
    """Return a request with its images: ``prompt`` has the model's image token at their places."""
    _check_last_n(request.prompt_logprobs_last_n, len(prompt))
    return replace(request, prompt=prompt, images=tuple(images))


def _check_last_n(last_n: int | None, tokens: int) -> None:
    if last_n is not None and last_n >= tokens:
        raise InvalidInputError("prompt_logprobs_last_n", last_n, f"at most {tokens - 1}, all after the first")


# The names that parameters of the sampler have in a request.
_SENT_AS = {
    **{name: f"sampling_params.{name}" for name in ("max_tokens", "seed", "temperature", "top_k", "top_p")},
    "stop_strings": "sampling_params.stop",
    "stop_tokens": "sampling_params.stop",
    "prompt_alt_tokens": "prompt_alt_tokens_k",
}


def as_sent(error: Exception) -> Exception:
    """Return an error of the sampler with the name that its field has in a request; other errors unchanged."""
    if not isinstance(error, InvalidInputError):
        return error
    return error.renamed(_SENT_AS.get(error.field, error.field))


# --- results ----------------------------------------------------------------------------------------------------------


def encode_sample_result(result: SampleResult, targets: Csr | None = None) -> Outcome:
    """Return a sample's result as protobuf.

    ``targets``: the sparse target_prompt_logprobs of the request; None if they were dense or not given.
    """
    response = pb.SampleResponse(
        sequences=[_sequence(sequence) for sequence in result.sequences],
        prompt_cache_hit_tokens=result.cached_prompt_tokens,
    )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        response.topk_prompt_logprobs.CopyFrom(_top_logprobs(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        logprobs, dtype = result.target_prompt_logprobs, pb.DTYPE_FLOAT32
        tensor = encode_tensor(logprobs, dtype) if targets is None else encode_csr(logprobs, targets, dtype)
        response.target_prompt_logprobs.CopyFrom(tensor)
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
    """Return a top-k table as protobuf. Cells whose log-probability is NaN or infinite, as at position 0, are empty."""
    length, k = top.token_ids.shape
    given = np.isfinite(top.logprobs)
    return pb.TopkLogprobs(
        token_ids=np.where(given, top.token_ids, _NO_TOKEN).astype("<i4").tobytes(),
        logprobs=np.where(given, top.logprobs, _NO_LOGPROB).astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _drawn(drawn: DrawnTokens) -> pb.PromptAltTokens:
    return pb.PromptAltTokens(
        tokens=encode_tensor(drawn.tokens, pb.DTYPE_INT64),
        logprobs=encode_tensor(drawn.logprobs, pb.DTYPE_FLOAT32),
    )
