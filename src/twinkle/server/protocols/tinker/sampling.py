"""Sampling sessions and samples."""

import hashlib
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from twinkle.sampler.types import SampleRequest
from twinkle.server.http.requests import (
    JSON_BYTES,
    PREFIX,
    SMALL_BODY,
    body_of,
    gateway_of,
    json_response,
    parsed,
    tenant_of,
)
from twinkle.server.wire import fields
from twinkle.server.wire.sample_requests import (
    AsampleRequest,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    to_sample_request,
)
from twinkle.server.wire.sampling import Encode

router = APIRouter(prefix=PREFIX)


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(CreateSamplingSessionRequest, request)
    session = await gateway_of(request).create_sampling_session(
        tenant_id, wanted.session_id, wanted.sampling_session_seq_id, wanted.base_model, wanted.model_path
    )
    return json_response({"sampling_session_id": session.sampling_session_id, "type": "create_sampling_session"})


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    wanted = await parsed(JoinSamplingSessionRequest, request)
    session = await gateway.sampling_session(wanted.sampling_session_id, tenant_id)
    number = await gateway.join_sampling_session(session)
    return json_response({"client_counter": number, "type": "join_sampling_session"})


@router.get("/samplers/{sampler_id}")
async def sampler(request: Request, sampler_id: str) -> Response:
    tenant_id = await tenant_of(request)
    session = await gateway_of(request).sampling_session(sampler_id, tenant_id)
    return json_response(
        {
            "sampler_id": session.sampling_session_id,
            "base_model": session.base_model,
            "model_path": session.model_path,
        }
    )


@router.post("/asample")
async def asample(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    gateway = gateway_of(request)
    body = await body_of(request, 4 * JSON_BYTES)  # half a million tokens
    small = len(body) < SMALL_BODY
    read = partial(_read, body)
    wanted, sample, encode, digest = read() if small else await gateway.reading.in_thread(tenant_id, read)
    session = await gateway.sampling_session(wanted.sampling_session_id, tenant_id)
    sample = replace(sample, version_id=session.version_id)
    await gateway.sample(session, wanted.seq_id, sample, encode, digest)
    samples = [f"{wanted.request_id}:{number}" for number in range(wanted.num_samples)]
    return json_response({"request_id": wanted.request_id, "sample_sequence_ids": samples})


def _read(body: bytes) -> tuple[AsampleRequest, SampleRequest, Encode, bytes]:
    wanted = fields.parse(AsampleRequest, body)
    sample, encode = to_sample_request(wanted, None)
    return wanted, sample, encode, hashlib.blake2b(body, digest_size=16).digest()
