"""Sampling sessions and samples."""

import asyncio

from fastapi import APIRouter, Request, Response

from twinkle.server.routes.http import (
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
from twinkle.server.wire.requests import AsampleRequest, CreateSamplingSessionRequest, to_sample_request

router = APIRouter(prefix=PREFIX)


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await parsed(CreateSamplingSessionRequest, request)
    session = await gateway_of(request).create_sampling_session(
        tenant_id, wanted.session_id, wanted.sampling_session_seq_id, wanted.base_model, wanted.model_path
    )
    return json_response({"sampling_session_id": session.sampling_session_id, "type": "create_sampling_session"})


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
    if len(body) < SMALL_BODY:
        wanted = fields.parse(AsampleRequest, body)
    else:
        wanted = await asyncio.to_thread(fields.parse, AsampleRequest, body)
    session = await gateway.sampling_session(wanted.sampling_session_id, tenant_id)
    gateway.sampler_of(session).sample(session, to_sample_request(wanted, session.version_id))
    samples = [f"{wanted.request_id}:{number}" for number in range(wanted.num_samples)]
    return json_response({"request_id": wanted.request_id, "sample_sequence_ids": samples})
