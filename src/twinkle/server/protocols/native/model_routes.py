"""The library's objects over HTTP: a model's verbs, each answered when its op has ended, and processors.

Bodies for processors are not read here: JSON of many rows would keep everybody waiting. The worker of the
session reads them.
"""

import json
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.server.http.requests import JSON_BYTES, PREFIX, SMALL_BODY, body_of, gateway_of, json_response
from twinkle.server.ids import CheckpointPath
from twinkle.server.processors.service import ProcessorService
from twinkle.server.protocols.native import requests
from twinkle.server.protocols.native.requests import (
    IDEMPOTENCY_HEADER,
    NUMBER_HEADER,
    ROWS_BYTES,
    caller_of,
    native_tenant_of,
)
from twinkle.server.types import Outcome
from twinkle.server.verbs.verbs import verb_named
from twinkle.server.wire import fields
from twinkle_client import types

router = APIRouter(prefix=f"{PREFIX}/model")

_MODEL = "/{model:path}/twinkle"


@router.post(f"{_MODEL}/create")
async def create(request: Request, model: str) -> Response:
    await native_tenant_of(request)
    await body_of(request, JSON_BYTES)
    requests.services_of(gateway_of(request), model)
    return json_response(types.CreateResponse().model_dump())


@router.post(f"{_MODEL}/add_adapter_to_model")
async def add_adapter_to_model(request: Request, model: str) -> Response:
    caller = await caller_of(request)
    wanted = fields.parse(types.AddAdapterRequest, await body_of(request, JSON_BYTES))
    run_id, outcome = await requests.add_adapter(
        gateway_of(request), caller.tenant_id, caller.session_id, model, wanted
    )
    if outcome.failed:
        return _answer(outcome)
    return json_response(types.AddAdapterResponse(adapter_name=run_id).model_dump())


@router.post(f"{_MODEL}/remove_adapter")
async def remove_adapter(request: Request, model: str) -> Response:
    caller = await caller_of(request)
    wanted = fields.parse(types.RemoveAdapterRequest, await body_of(request, JSON_BYTES))
    gateway = gateway_of(request)
    await requests.remove_adapter(gateway, caller.tenant_id, caller.session_id, model, wanted.adapter_name)
    return json_response(types.RemoveAdapterResponse().model_dump())


@router.post(f"{_MODEL}/upload_to_hub")
async def upload_to_hub(request: Request, model: str) -> Response:
    tenant_id = await native_tenant_of(request)
    wanted = fields.parse(types.UploadToHubRequest, await body_of(request, JSON_BYTES))
    gateway = gateway_of(request)
    requests.services_of(gateway, model)
    address = wanted.checkpoint_dir
    if isinstance(address, dict):
        address = str(address.get("twinkle_path"))
    if wanted.hub_token is None:
        raise InvalidInputError("hub_token", None, "a token of the hub: the key of this server is not sent there")
    path = CheckpointPath.parse(address, "checkpoint_dir")
    record = await gateway.checkpoint(path, tenant_id)
    directory: Path = gateway.files.root / record.directory
    key = request.headers.get(IDEMPOTENCY_HEADER)
    request_id = gateway.uploads.start(tenant_id, key, directory, path.native, wanted.hub_model_id, wanted.hub_token)
    return json_response(types.UploadToHubResponse(request_id=request_id).model_dump())


@router.get(f"{_MODEL}/upload_status/{{request_id}}")
async def upload_status(request: Request, model: str, request_id: str) -> Response:
    tenant_id = await native_tenant_of(request)
    gateway = gateway_of(request)
    requests.services_of(gateway, model)
    return json_response(gateway.uploads.status(tenant_id, request_id).model_dump())


@router.post(f"{_MODEL}/{{verb}}")
async def run_verb(request: Request, model: str, verb: str) -> Response:
    caller = await caller_of(request)
    body = await body_of(request, ROWS_BYTES if verb_named(verb).takes_rows else JSON_BYTES)
    gateway, read = gateway_of(request), partial(requests.read_fields, body)
    small = len(body) < SMALL_BODY
    wanted = read() if small else await gateway.reading.in_thread(caller.tenant_id, read)
    if requests.is_of_base_model(verb, wanted):
        return _answer(await requests.forward_base(gateway, caller.tenant_id, caller.session_id, model, wanted))
    number, outcome = await requests.run_verb(gateway, caller.tenant_id, caller.session_id, model, verb, wanted, body)
    answer = _answer(outcome)
    # By this a client knows of a refusal that it has a place in the sequence. What is refused earlier has none.
    answer.headers[NUMBER_HEADER] = str(number)
    return answer


def _answer(outcome: Outcome) -> Response:
    if not outcome.failed:
        return Response(outcome.body, media_type=outcome.encoding.value)
    failure = json.loads(outcome.body)
    return json_response({"detail": failure["error"]}, 400 if failure["category"] == "user" else 500)


processor_router = APIRouter(prefix=f"{PREFIX}/processor/twinkle")


@processor_router.post("/create")
async def create_processor(request: Request) -> Response:
    caller = await caller_of(request)
    service = _service(request)
    gateway_of(request).memory.guard.check()
    body, key = await body_of(request), request.headers.get(IDEMPOTENCY_HEADER)
    made = await service.create(caller.tenant_id, caller.session_id, body, key)
    session = await gateway_of(request).session(caller.session_id, caller.tenant_id)
    if session.state != "active":  # it ended meanwhile, and did not know of this processor
        await service.end_session(caller.session_id)
    return json_response({"processor_id": made})


@processor_router.post("/call")
async def call(request: Request) -> Response:
    caller = await caller_of(request)
    service = _service(request)
    gateway_of(request).memory.guard.check()
    body, key = await body_of(request), request.headers.get(IDEMPOTENCY_HEADER)
    result = await service.call(caller.tenant_id, caller.session_id, body, key)
    return Response(result, media_type="application/json")


def _service(request: Request) -> ProcessorService:
    service = gateway_of(request).processors
    if not isinstance(service, ProcessorService):
        raise UnsupportedError("this server has no processors: its configuration has no application of theirs")
    return service
