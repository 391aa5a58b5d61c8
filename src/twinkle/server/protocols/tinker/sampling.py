"""Routes for sampling sessions and samples."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Response

from twinkle.images import SentImages
from twinkle.sampler.types import SampleRequest
from twinkle.server.gateway import sampling_targets as targets
from twinkle.server.http.owners import anybody, by_new_sampling_session, by_sampling_session
from twinkle.server.http.requests import PREFIX, decoded, json_response
from twinkle.server.http.routes import Call, Routes, json_body, raw_body
from twinkle.server.ids import RequestId
from twinkle.server.wire.image_files import ImageAllowance
from twinkle.server.wire.sampling import (
    AsampleRequest,
    CreateSamplingSessionRequest,
    Encode,
    JoinSamplingSessionRequest,
    parse_sample,
    to_sample_request,
)

routes = Routes(PREFIX)


@dataclass(frozen=True)
class _Sample:
    """A decoded request for a sample. Its request id, which needs a number, and its images are set later.

    ``digest``: a hash of its body. A sequence number that comes again with another digest is refused.
    """

    wanted: AsampleRequest
    request: SampleRequest
    images: SentImages
    encode: Encode
    digest: bytes

    @classmethod
    def read(cls, body: bytes, left: ImageAllowance) -> "_Sample":
        wanted = parse_sample(body)
        request, images, encode = to_sample_request(wanted, None, left)
        return cls(wanted, request, images, encode, hashlib.blake2b(body, digest_size=16).digest())


# The limit of the body is larger than usual, because a prompt may have half a million tokens, or images.
@routes.post("/asample", by_sampling_session, raw_body(AsampleRequest, limit=None), soon=True)
async def asample(call: Call[bytes]) -> Response:
    limits = call.gateway.config.limits
    left = ImageAllowance(limits.max_images_per_request, limits.max_image_bytes)
    sample = await decoded(call.request, call.raw, partial(_Sample.read, left=left))
    wanted = sample.wanted
    session = await call.gateway.sampling_session(wanted.sampling_session_id, call.tenant_id)
    number = await call.gateway.unused_sample_number(session) if wanted.seq_id is None else wanted.seq_id
    request_id = str(RequestId(session.sampling_session_id, number))
    request = replace(sample.request, request_id=request_id, version_id=session.version_id)
    await call.gateway.sample(session, number, request, sample.encode, sample.digest, sample.images)
    samples = [f"{request_id}:{index}" for index in range(wanted.num_samples)]
    return json_response({"request_id": request_id, "sample_sequence_ids": samples})


@routes.post("/create_sampling_session", by_new_sampling_session, json_body(CreateSamplingSessionRequest), soon=True)
async def create_sampling_session(call: Call[CreateSamplingSessionRequest]) -> Response:
    session = await targets.create_sampling_session(call.gateway, call.tenant_id, call.body)
    return json_response({"sampling_session_id": session.sampling_session_id, "type": "create_sampling_session"})


@routes.post("/join_sampling_session", anybody, json_body(JoinSamplingSessionRequest))
async def join_sampling_session(call: Call[JoinSamplingSessionRequest]) -> Response:
    session = await call.gateway.sampling_session(call.body.sampling_session_id, call.tenant_id)
    number = await call.gateway.store.sampling_sessions.join(session.sampling_session_id)
    return json_response({"client_counter": number, "type": "join_sampling_session"})


@routes.get("/samplers/{sampler_id}", anybody)
async def sampler(call: Call[bytes], sampler_id: str) -> Response:
    """Describe a sampler. The SDK loads the tokenizer by ``base_model``, so that is a name that can be loaded."""
    session = await call.gateway.sampling_session(sampler_id, call.tenant_id)
    # The model's services may be in another process, and a model that is not served any more has no configuration.
    served = next((one for one in call.gateway.config.served_models if one.name == session.model_name), None)
    return json_response(
        {
            "sampler_id": session.sampling_session_id,
            "base_model": session.base_model if served is None else served.loadable_name(session.base_model),
            "model_path": session.model_path,
        }
    )
