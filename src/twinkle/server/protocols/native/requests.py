"""What the routes of our own protocol share: who asks, in which session, and requests against adapters."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Response
from pydantic import BaseModel

from twinkle.errors import (
    InvalidInputError,
    NotFoundError,
    ShuttingDownError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)
from twinkle.model.peft_config import spec_from_peft
from twinkle.model.types import LoraSpec
from twinkle.server import ids
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.http.requests import SMALL_BODY
from twinkle.server.http.routes import Call
from twinkle.server.ids import RequestId
from twinkle.server.state.files.export import allowed_path
from twinkle.server.types import Op, Outcome, RunRecord
from twinkle.server.verbs.codec import SentVerb, create_op, lora_config
from twinkle.server.verbs.features import are_encoded, as_rows, checked_rows
from twinkle.server.verbs.templates import SetTemplate
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import check
from twinkle_client.protocol.base import SESSION_HEADER, TYPE_KEY
from twinkle_client.protocol.verbs import AdapterOptions, AddAdapterRequest, BatchReference

# Of requests with rows. Parsing lets no other thread work: so much takes a quarter of a second, for two million tokens.
ROWS_BYTES = 16 * 2**20
ANY_KEY = ""  # with which keys of this protocol begin: any token is a tenant of its own, unless the server has keys
_WAIT_SECONDS = 25.0


async def session_of(call: Call[Any]) -> str:
    """Return the id of the session that a request names, which must be the tenant's and active."""
    session_id = call.request.headers.get(SESSION_HEADER)
    if not session_id:
        raise InvalidInputError(f"{SESSION_HEADER} header", session_id, "the id that create_session returned")
    await call.gateway.active_session(session_id, call.tenant_id)
    return session_id


def wire_response(body: BaseModel, status: int = 200) -> Response:
    """Answer with JSON. Numbers that are not finite become null."""
    return Response(body.model_dump_json(), status, media_type="application/json")


def services_of(gateway: Gateway, model: str) -> Services:
    try:
        return gateway.model(model)
    except UnknownNameError as error:
        raise NotFoundError("model", f"{model}: {error}") from None


async def add_adapter(
    gateway: Gateway, tenant_id: str, session_id: str, model: str, request: AddAdapterRequest
) -> tuple[str, Outcome]:
    """Return the run's id, and how its creation ended. The same request again has the same answer."""
    services = services_of(gateway, model)
    run_id = ids.native_run_id(session_id, request.adapter_name)
    if not ids.is_native_run(run_id):
        raise InvalidInputError(f"{SESSION_HEADER} header", session_id, "a session of twinkle/create_session")
    options = check(AdapterOptions, request.arguments)
    config = lora_config(request.config)
    spec = _spec(config, options.seed)
    check_adapter = partial(services.model.trainer.check_adapter, spec)
    await gateway.reading.in_thread(tenant_id, check_adapter)  # before its name is taken
    metadata = {"adapter_name": request.adapter_name}
    if request.save_dir is not None:
        metadata["save_dir"] = str(allowed_path("save_dir", request.save_dir, gateway.config.allowed_dirs))
    await _refuse_used_name(gateway, run_id, request.adapter_name)
    run = gateway.new_run(
        run_id,
        tenant_id,
        session_id,
        ids.native_run_number(request.adapter_name),
        services.model.name,
        spec,
        metadata,
    )
    request_id = await gateway.create_run(
        run, create_op(run, config, options.gradient_accumulation_steps, options.seed)
    )
    return run_id, await _outcome(gateway, run, RequestId.parse(request_id))


async def run_verb(
    gateway: Gateway, tenant_id: str, session_id: str, model: str, sent: SentVerb
) -> tuple[int, Outcome]:
    """Submit a verb and wait for it; return (its number in the adapter's sequence, how it ended).

    Without a number it gets the next one. A number that is used again gets its answer, and nothing of the request is
    looked at: a batch that it names may be gone by then.
    """
    run = await adapter_run(gateway, tenant_id, session_id, model, sent.fields.get("adapter_name"))
    training = gateway.serving(run.model_name).training
    number = _number(sent.fields)
    if number is not None and await training.was_accepted(run.run_id, number, (sent.digest, sent.text_digest)):
        request = RequestId(run.run_id, number)
    else:
        training.check_room(run.run_id)
        request = RequestId.parse(await _submit(gateway, run, number, sent))
    outcome = await _outcome(gateway, run, request)
    return request.number if number is None else number, outcome


async def _submit(gateway: Gateway, run: RunRecord, number: int | None, sent: SentVerb) -> str:
    """Make an op of a request and submit it; return the id of the request."""
    training = gateway.serving(run.model_name).training
    if number is None:
        resolved = await _resolved(gateway, run, sent)
        async with training.next_number(run.run_id) as number:
            return await training.submit(await _op(gateway, run, number, resolved))
    try:
        op = await _op(gateway, run, number, await _resolved(gateway, run, sent))
    except UserError as error:  # its place in the sequence is taken all the same
        op = sent.refused(run.run_id, number, str(error))
    return await training.submit(op)


async def _resolved(gateway: Gateway, run: RunRecord, sent: SentVerb) -> SentVerb:
    """Return the request with checked rows of tokens as inputs, and with a template that is ready.

    The journal keeps what was sent, unless it names a batch, has conversations or chooses a template: these may mean
    something else, or nothing, when they are replayed.
    """
    services, fields = gateway.serving(run.model_name), sent.fields
    if "inputs" in fields:
        text = gateway.tenants.pools.text
        inputs = await _inputs(gateway, run.tenant_id, run.session_id, fields["inputs"])
        most, rows = gateway.config.limits.max_tokens_per_request, as_rows(inputs)
        says_all = inputs is fields["inputs"] and are_encoded(rows)
        if not are_encoded(rows):
            async with services.training.in_trainer(run.run_id):  # it has the template that was set
                sent_rows = rows  # the first one who asks for the adapters imports torch: not on the event loop
                rows = await text.in_thread(
                    run.tenant_id, lambda: services.native.adapters.encode(run.run_id, sent_rows, most)
                )
        checked = await text.in_thread(run.tenant_id, partial(checked_rows, rows, most))
        return replace(sent, fields={**fields, "inputs": checked}, text=sent.text if says_all else None)
    if sent.verb == "set_template":
        return replace(sent, fields=await _chosen_template(gateway, run.tenant_id, services, fields), text=None)
    return sent


async def _op(gateway: Gateway, run: RunRecord, number: int, resolved: SentVerb) -> Op:
    """Return the op; one that may be large is not made on the event loop."""
    if "inputs" not in resolved.fields and len(resolved.text or b"") < SMALL_BODY:
        return resolved.op(run.run_id, number)
    return await gateway.reading.in_thread(run.tenant_id, partial(resolved.op, run.run_id, number))


async def forward_base(
    gateway: Gateway, tenant_id: str, session_id: str, model: str, fields: Mapping[str, Any]
) -> Outcome:
    """Run forward_only on the base model: for a request that names no adapter."""
    services = services_of(gateway, model)
    inputs = await _inputs(gateway, tenant_id, session_id, fields.get("inputs"))
    most = gateway.config.limits.max_tokens_per_request
    return await services.native.base_model.forward(tenant_id, {**fields, "inputs": inputs}, most)


def is_of_base_model(sent: SentVerb) -> bool:
    return sent.verb == "forward_only" and sent.fields.get("adapter_name") in (None, "")


async def remove_adapter(gateway: Gateway, tenant_id: str, session_id: str, model: str, adapter_name: str) -> None:
    """Evict an adapter: its last state is kept as a checkpoint for a while. A second time changes nothing."""
    services = services_of(gateway, model)
    run = await gateway.run(ids.native_run_id(session_id, adapter_name), tenant_id)
    if run.model_name != services.model.name:
        raise NotFoundError("adapter", f"{adapter_name} of {model}")
    await gateway.park(run, f"adapter {adapter_name} was removed")


async def adapter_run(gateway: Gateway, tenant_id: str, session_id: str, model: str, adapter_name: object) -> RunRecord:
    """Return the run of an adapter of this session that is live on this model."""
    if not isinstance(adapter_name, str) or not adapter_name:
        raise InvalidInputError("adapter_name", adapter_name, "the name that add_adapter_to_model was given")
    services = services_of(gateway, model)
    run = await gateway.run(ids.native_run_id(session_id, adapter_name), tenant_id)
    if run.model_name != services.model.name or services.training.run(run.run_id) is None:
        raise NotFoundError("adapter", f"{adapter_name} of {model}", run.note or "")
    return run


async def _refuse_used_name(gateway: Gateway, run_id: str, adapter_name: str) -> None:
    """Refuse the name of an adapter that was removed: its run and checkpoints would be mistaken for the new one's."""
    earlier = await gateway.store.runs.get(run_id)
    if earlier is not None and earlier.state == "parked":
        raise InvalidInputError(
            "adapter_name", adapter_name, f"a name not used before in this session ({earlier.note})"
        )


def _number(fields: Mapping[str, Any]) -> int | None:
    number = fields.get("seq_id")
    if number is None or (type(number) is int and 1 <= number < 2**62):
        return number
    raise MalformedRequestError(f"seq_id: got {str(number)[:40]}, allowed: 1 and up, or none")


def _spec(config: Mapping[str, Any], seed: int | None) -> LoraSpec:
    """Return the adapter's options with a seed. It is written down: a replay must come to the same adapter."""
    return replace(spec_from_peft(config), seed=secrets.randbits(62) if seed is None else seed)


async def _inputs(gateway: Gateway, tenant_id: str, session_id: str, inputs: object) -> object:
    """Return the inputs, or the batch that they name, which a dataloader on the server holds."""
    if not isinstance(inputs, dict) or inputs.get(TYPE_KEY) != "Batch":
        return inputs
    if gateway.processors is None:
        raise UnsupportedError("inputs: this server has no processor service, and so no batches; send rows")
    reference = check(BatchReference, inputs)
    return await gateway.processors.batch(tenant_id, session_id, reference.processor_id, reference.number)


async def _chosen_template(
    gateway: Gateway, tenant_id: str, services: Services, fields: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Check the chosen template, and build it before the compute thread asks for it."""
    given = {name: value for name, value in fields.items() if name != "seq_id"}
    choice = check(SetTemplate, given).choice(services.model)
    await gateway.tenants.pools.text.in_thread(tenant_id, partial(services.native.templates.get, choice))
    return {"adapter_name": fields["adapter_name"], **choice.model_dump()}


async def _outcome(gateway: Gateway, run: RunRecord, request: RequestId) -> Outcome:
    """Wait for an outcome however long it takes, unless the server ends."""
    training = gateway.serving(run.model_name).training
    while not gateway.stopping:
        outcome = await training.wait(request, run, _WAIT_SECONDS)
        if outcome is not None:
            with training.delivering(str(request)) as delivery:
                delivery.complete = True  # whoever misses the answer sends the request again, under its number
            return outcome
    raise ShuttingDownError
