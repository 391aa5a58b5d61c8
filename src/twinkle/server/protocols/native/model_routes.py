"""The library's objects over HTTP: a model's verbs, each answered when its op has ended, and processors.

Bodies for processors are not decoded in this process, because parsing the JSON of many rows would block it. The
session's worker process decodes them.
"""

from functools import partial
from pathlib import Path

from fastapi import Response

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.owners import by_adapter, by_base_model, by_first_replica, by_new_adapter, by_processors
from twinkle.server.http.requests import JSON_BYTES, PREFIX, body_of, decoded, is_local, json_response
from twinkle.server.http.routes import Call, Routes, json_body, raw_body, unread_body
from twinkle.server.ids import CheckpointPath
from twinkle.server.processors.service import ProcessorService
from twinkle.server.protocols.native.requests import (
    ANY_KEY,
    AdapterCall,
    is_of_base_model,
    services_of,
    session_of,
    wire_response,
)
from twinkle.server.types import Outcome
from twinkle.server.verbs.codec import SentVerb
from twinkle.server.verbs.verbs import verb_named
from twinkle_client.protocol.base import IDEMPOTENCY_HEADER, NUMBER_HEADER, OkResponse
from twinkle_client.protocol.sessions import (
    ModelInfoResponse,
    ProcessorHeartbeatRequest,
    ProcessorHeartbeatResponse,
)
from twinkle_client.protocol.verbs import (
    AddAdapterRequest,
    AddAdapterResponse,
    CreateResponse,
    RemoveAdapterRequest,
    UploadToHubRequest,
    UploadToHubResponse,
)

routes = Routes(PREFIX, key_prefix=ANY_KEY)

_MODEL = "/model/{model:path}/twinkle"


@routes.post(f"{_MODEL}/create", by_base_model, raw_body())
async def create(call: Call[bytes], model: str) -> Response:
    return wire_response(CreateResponse(train_mode=services_of(call.gateway, model).model.train_mode))


@routes.get(f"{_MODEL}/get_info", by_base_model)
async def get_info(call: Call[bytes], model: str) -> Response:
    """Describe a model. Only clients on this machine get model_folder, from which they may load the tokenizer."""
    served = services_of(call.gateway, model).model
    return wire_response(
        ModelInfoResponse(
            model_name=served.name,
            architecture=served.architecture,
            max_context_length=served.max_context_length,
            model_folder=served.tokenizer_dir if is_local(call.request) else None,
        )
    )


@routes.post(f"{_MODEL}/add_adapter_to_model", by_new_adapter, json_body(AddAdapterRequest))
async def add_adapter_to_model(call: Call[AddAdapterRequest], model: str) -> Response:
    run_id, outcome = await (await AdapterCall.of_call(call, model)).add_adapter(call.body)
    return _answer(outcome) if outcome.failed else wire_response(AddAdapterResponse(adapter_name=run_id))


@routes.post(f"{_MODEL}/remove_adapter", by_adapter, json_body(RemoveAdapterRequest))
async def remove_adapter(call: Call[RemoveAdapterRequest], model: str) -> Response:
    await (await AdapterCall.of_call(call, model)).remove_adapter(call.body.adapter_name)
    return wire_response(OkResponse())


# Uploads are only in the memory of the process that runs them: on Ray that is the first replica.
@routes.post(f"{_MODEL}/upload_to_hub", by_first_replica, json_body(UploadToHubRequest))
async def upload_to_hub(call: Call[UploadToHubRequest], model: str) -> Response:
    gateway, wanted = call.gateway, call.body
    services_of(gateway, model)
    address = wanted.checkpoint_dir
    if isinstance(address, dict):
        address = str(address.get("twinkle_path"))
    if wanted.hub_token is None:
        raise InvalidInputError("hub_token", None, "a token of the hub; your API key is not sent to the hub")
    path = CheckpointPath.parse(address, "checkpoint_dir")
    record = await gateway.checkpoint(path, call.tenant_id)
    directory: Path = gateway.files.root / record.directory
    key = call.request.headers.get(IDEMPOTENCY_HEADER)
    request_id = gateway.uploads.start(
        call.tenant_id, key, directory, path.native, wanted.hub_model_id, wanted.hub_token
    )
    return wire_response(UploadToHubResponse(request_id=request_id))


@routes.get(f"{_MODEL}/upload_status/{{request_id}}", by_first_replica)
async def upload_status(call: Call[bytes], model: str, request_id: str) -> Response:
    services_of(call.gateway, model)
    return wire_response(call.gateway.uploads.status(call.tenant_id, request_id))


# Declared after all other paths of a model, because it matches each of them.
@routes.post(f"{_MODEL}/{{verb}}", by_adapter, unread_body(limit=None))
async def run_verb(call: Call[bytes], model: str, verb: str) -> Response:
    adapters = await AdapterCall.of_call(call, model)
    body = await body_of(call.request, None if verb_named(verb).takes_rows else JSON_BYTES)
    sent = await decoded(call.request, body, partial(SentVerb.received, verb))
    if is_of_base_model(sent):
        return _answer(await adapters.forward_base(sent.fields))
    number, outcome = await adapters.run_verb(sent)
    answer = _answer(outcome)
    # The header tells a client that even a refused request has used up its sequence number. A request that is refused
    # before this point has no number, and no header.
    answer.headers[NUMBER_HEADER] = str(number)
    return answer


def _answer(outcome: Outcome) -> Response:
    if not outcome.failed:
        return Response(outcome.body, media_type=outcome.encoding.value)
    return json_response({"detail": outcome.message}, 400 if outcome.category == "user" else 500)


# --- processors: create a dataset, loader or similar object, and call its methods -------------------------------------


@routes.post("/processor/twinkle/create", by_processors, unread_body(limit=None))
async def create_processor(call: Call[bytes]) -> Response:
    session_id = await session_of(call)
    service, body, key = await _processor_request(call)
    made = await service.create(call.tenant_id, session_id, body, key)
    session = await call.gateway.session(session_id, call.tenant_id)
    if session.state != "active":  # the session ended meanwhile, and its end missed this processor
        await service.end_session(session_id)
    return json_response({"processor_id": made})


@routes.post("/processor/twinkle/call", by_processors, unread_body(limit=None))
async def call_processor(call: Call[bytes]) -> Response:
    session_id = await session_of(call)
    service, body, key = await _processor_request(call)
    result = await service.call(call.tenant_id, session_id, body, key)
    return Response(result, media_type="application/json")


@routes.post("/processor/twinkle/heartbeat", by_processors, json_body(ProcessorHeartbeatRequest), traced=False)
async def processor_heartbeat(call: Call[ProcessorHeartbeatRequest]) -> Response:
    """Note that the client of a processor is alive; this is a heartbeat of the processor's session."""
    session_id = await session_of(call)
    _processors(call.gateway).check_alive(call.tenant_id, session_id, call.body.processor_id)
    await call.gateway.heartbeat(session_id, call.tenant_id)
    return wire_response(ProcessorHeartbeatResponse())


async def _processor_request(call: Call[bytes]) -> tuple[ProcessorService, bytes, str | None]:
    """Return the service, the body and the idempotency key.

    The body may be large, so the process's memory is checked before it is read.
    """
    service = _processors(call.gateway)
    call.gateway.memory.guard.check()
    return service, await body_of(call.request), call.request.headers.get(IDEMPOTENCY_HEADER)


def _processors(gateway: Gateway) -> ProcessorService:
    """Return the processor service of this process; UnsupportedError if the server has none."""
    if not isinstance(gateway.processors, ProcessorService):
        raise UnsupportedError("this server has no processors: its configuration has no processor application")
    return gateway.processors
