"""Helpers that the native protocol's routes share: the session of a request, and requests about adapters."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from twinkle.model.adapters.peft_config import spec_from_peft
from twinkle.model.types import FullSpec, TrainingSpec
from twinkle.server import ids
from twinkle.server.gateway.fleet import Services
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.replica_holds import WrongModeError
from twinkle.server.http.requests import SMALL_BODY
from twinkle.server.http.routes import Call
from twinkle.server.ids import RequestId
from twinkle.server.state.files.export import existing_dir
from twinkle.server.types import Op, Outcome, RunRecord
from twinkle.server.verbs.codec import SentVerb, create_op, lora_config
from twinkle.server.verbs.features import are_encoded, as_rows, checked_rows
from twinkle.server.verbs.templates import SetTemplate, TemplateChoice
from twinkle.server.wire.errors import MalformedRequestError
from twinkle.server.wire.fields import check
from twinkle.server.wire.image_files import ImageAllowance
from twinkle_client.protocol.base import SESSION_HEADER, TYPE_KEY
from twinkle_client.protocol.verbs import AdapterOptions, AddAdapterRequest, BatchReference

ANY_KEY = ""  # the prefix of keys: none, so that in open mode any token is a tenant of its own
_WAIT_SECONDS = 25.0  # of one wait for an outcome, which is repeated until the outcome is there
# The key in a session's user_metadata that holds its choice of a template for each model.
TEMPLATES_KEY = "twinkle.sampler_templates"


async def session_of(call: Call[Any]) -> str:
    """Return the id of the session in a request's header, which must be active and belong to the tenant."""
    session_id = call.request.headers.get(SESSION_HEADER)
    if not session_id:
        raise InvalidInputError(f"{SESSION_HEADER} header", session_id, "the id that create_session returned")
    await call.gateway.active_session(session_id, call.tenant_id)
    return session_id


def wire_response(body: BaseModel, status: int = 200) -> Response:
    """Return a JSON response. NaN and infinity become null."""
    return Response(body.model_dump_json(), status, media_type="application/json")


def services_of(gateway: Gateway, model: str) -> Services:
    """Return the services of the base model in a path; NotFoundError if this process does not serve it."""
    try:
        return gateway.model(model)
    except UnknownNameError:
        raise NotFoundError("model", model, f"served: {', '.join(gateway.config.listed_names)}") from None


def sampling_services_of(gateway: Gateway, model: str) -> Services:
    """Return the services of a base model; NotFoundError if it is not served for sampling."""
    services = services_of(gateway, model)
    if services.sampling is None:
        raise NotFoundError("sampler", model)
    return services


async def usable_template(gateway: Gateway, tenant_id: str, services: Services, asked: SetTemplate) -> TemplateChoice:
    """Return the requested template after building it once, so that one that cannot be built is refused now."""
    choice = asked.choice(services.model)
    await gateway.tenants.pools.text.in_thread(tenant_id, partial(services.native.templates.get, choice))
    return choice


@dataclass(frozen=True)
class AdapterCall:
    """A request about the adapters that a session has on one base model."""

    gateway: Gateway
    services: Services
    tenant_id: str
    session_id: str

    @classmethod
    async def of_call(cls, call: Call[Any], model: str) -> "AdapterCall":
        """Return the adapter call of an HTTP request; its session must be active, and its model served."""
        session_id = await session_of(call)
        return cls(call.gateway, services_of(call.gateway, model), call.tenant_id, session_id)

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def add_adapter(self, request: AddAdapterRequest) -> tuple[str, Outcome]:
        """Create an adapter; return its run id and the outcome. A repeated request gets the same answer.

        InvalidInputError if the session had an adapter of this name that was evicted. With ``train_mode: full`` the
        run trains all parameters instead; ReplicaHeldError if another run does.
        """
        gateway, name = self.gateway, request.adapter_name
        run_id = ids.native_run_id(self.session_id, name)
        if not ids.is_native_run(run_id):
            raise InvalidInputError(f"{SESSION_HEADER} header", self.session_id, "a session of twinkle/create_session")
        options = check(AdapterOptions, request.arguments)
        config, spec = self._wanted(request, options.seed)
        check_adapter = partial(self.services.model.trainer.check_adapter, spec)
        await gateway.reading.in_thread(self.tenant_id, check_adapter)  # before the adapter's name is used up
        metadata = {"adapter_name": name}
        if request.save_dir is not None:
            wanted = partial(existing_dir, "save_dir", request.save_dir, gateway.config.allowed_dirs)
            metadata["save_dir"] = str(await gateway.reading.in_thread(self.tenant_id, wanted))
        earlier = await gateway.store.runs.get(run_id)
        if earlier is not None and earlier.state == "parked":  # a new run of this name would mix with its checkpoints
            allowed = f"a name not used before in this session ({earlier.note})"
            raise InvalidInputError("adapter_name", name, allowed)
        number, model = ids.native_run_number(name), self.services.model.name
        run = gateway.new_run(run_id, self.tenant_id, self.session_id, number, model, spec, metadata)
        op = create_op(run, config, options.gradient_accumulation_steps, options.seed)
        request_id = await gateway.create_run(run, op)
        return run_id, await self._outcome(run, RequestId.parse(request_id))

    def _wanted(self, request: AddAdapterRequest, seed: int | None) -> tuple[dict[str, Any], TrainingSpec]:
        """Return the LoRA configuration of a new adapter and its spec; for all parameters, an empty configuration."""
        model = self.services.model
        if (request.config is None) is not (model.train_mode == "full"):
            raise WrongModeError("config", model.name, model.train_mode)
        if request.config is None:
            return {}, FullSpec()
        config = lora_config(request.config)
        # The seed is stored with the run: a replay must initialize the same weights.
        return config, replace(spec_from_peft(config), seed=secrets.randbits(62) if seed is None else seed)

    async def remove_adapter(self, adapter_name: str) -> None:
        """Evict an adapter; its last state is kept as a checkpoint for a while. A repeated call changes nothing."""
        run = await self._run(adapter_name, live=False)
        await self.gateway.evict(run, f"adapter {adapter_name} was removed")

    async def _run(self, adapter_name: str, *, live: bool) -> RunRecord:
        """Return the run of an adapter of this session on this model.

        NotFoundError if there is none. ``live``: also if the adapter is evicted and accepts no ops any more.
        """
        model, training = self.services.model, self.services.training
        run = await self.gateway.run_record(ids.native_run_id(self.session_id, adapter_name), self.tenant_id)
        if run.model_name != model.name:
            raise NotFoundError("adapter", f"{adapter_name} of {model.name}", run.note or "")
        if live and run.run_id not in training.adapters:
            raise NotFoundError("adapter", f"{adapter_name} of {model.name}", training.absence(run))
        return run

    # --- verbs --------------------------------------------------------------------------------------------------------

    async def run_verb(self, sent: SentVerb) -> tuple[int, Outcome]:
        """Submit a verb, wait for it, and return its sequence number and its outcome.

        A request without a number gets the next one. A request that is sent again under its number gets the outcome of
        the first one, and its content is not resolved again: a batch that it names may be gone by then.
        """
        training, adapter_name = self.services.training, sent.fields.get("adapter_name")
        if not isinstance(adapter_name, str) or not adapter_name:
            raise InvalidInputError("adapter_name", adapter_name, "the name that add_adapter_to_model was given")
        run = await self._run(adapter_name, live=True)
        number = _number(sent.fields)
        if number is not None and await training.was_accepted(run.run_id, number, (sent.digest, sent.text_digest)):
            request = RequestId(run.run_id, number)
        else:
            training.check_room(run.run_id)
            request = RequestId.parse(await self._submit(run, number, sent))
        outcome = await self._outcome(run, request)
        return request.number if number is None else number, outcome

    async def _submit(self, run: RunRecord, number: int | None, sent: SentVerb) -> str:
        """Turn a request into an op and submit it; return the request id."""
        training = self.services.training
        if number is None:
            resolved = await self._resolved(run, sent)
            async with training.next_number(run.run_id) as number:
                return await training.submit(await self._op(run, number, resolved))
        try:
            op = await self._op(run, number, await self._resolved(run, sent))
        except UserError as error:  # the sequence number is used up all the same
            op = sent.refused(run.run_id, number, str(error))
        return await training.submit(op)

    async def _resolved(self, run: RunRecord, sent: SentVerb) -> SentVerb:
        """Return the request with its inputs as checked rows of tokens, and with its template built.

        The journal stores the text that the client sent, if a replay of that text must give the same op. It stores the
        resolved request instead (``text`` is None) if the text names a batch, has conversations or chooses a template:
        at a replay, these may have changed or be gone.
        """
        fields, text = sent.fields, self.gateway.tenants.pools.text
        if "inputs" in fields:
            inputs = await self._inputs(fields["inputs"])
            most, rows = self.gateway.config.limits.max_tokens_per_request, as_rows(inputs)
            says_all = inputs is fields["inputs"] and are_encoded(rows)
            if not are_encoded(rows):
                async with self.services.training.in_trainer(run.run_id):  # the loaded adapter has its template
                    sent_rows = rows
                    # The first access to ``adapters`` imports torch, so it must happen inside the thread.
                    rows = await text.in_thread(
                        self.tenant_id, lambda: self.services.native.adapters.encode(run.run_id, sent_rows, most)
                    )
            left = image_allowance(self.gateway)
            checked = await text.in_thread(self.tenant_id, partial(checked_rows, rows, most, left))
            return replace(sent, fields={**fields, "inputs": checked}, text=sent.text if says_all else None)
        if sent.verb == "set_template":
            asked = check(SetTemplate, {name: value for name, value in fields.items() if name != "seq_id"})
            choice = await usable_template(self.gateway, self.tenant_id, self.services, asked)
            chosen = {"adapter_name": fields["adapter_name"], **choice.model_dump()}
            return replace(sent, fields=chosen, text=None)
        return sent

    async def _op(self, run: RunRecord, number: int, resolved: SentVerb) -> Op:
        """Return the op of a request. One that may be large is made in a thread, not on the event loop."""
        if "inputs" not in resolved.fields and len(resolved.text or b"") < SMALL_BODY:
            return resolved.op(run.run_id, number)
        return await self.gateway.reading.in_thread(self.tenant_id, partial(resolved.op, run.run_id, number))

    async def forward_base(self, fields: Mapping[str, Any]) -> Outcome:
        """Run forward_only on the base model, for a request that names no adapter."""
        inputs = await self._inputs(fields.get("inputs"))
        most = self.gateway.config.limits.max_tokens_per_request
        asked = {**fields, "inputs": inputs}
        return await self.services.native.base_model.forward(self.tenant_id, asked, most, image_allowance(self.gateway))

    async def _inputs(self, inputs: object) -> object:
        """Return the inputs; if they refer to a batch, return the batch, which a dataloader on the server holds."""
        if not isinstance(inputs, dict) or inputs.get(TYPE_KEY) != "Batch":
            return inputs
        processors = self.gateway.processors
        if processors is None:
            raise UnsupportedError("inputs: this server has no processor service, and so no batches; send rows")
        reference = check(BatchReference, inputs)
        return await processors.batch(self.tenant_id, self.session_id, reference.processor_id, reference.number)

    async def _outcome(self, run: RunRecord, request: RequestId) -> Outcome:
        """Wait for an outcome, however long it takes; ShuttingDownError if the server stops meanwhile."""
        training = self.services.training
        while not self.gateway.stopping:
            outcome = await training.wait(request, run, _WAIT_SECONDS)
            if outcome is not None:
                with training.delivering(str(request)) as delivery:
                    delivery.complete = True  # a client that misses the answer sends the request again, with its number
                return outcome
        raise ShuttingDownError


def image_allowance(gateway: Gateway) -> ImageAllowance:
    """Return the images that one request may have."""
    limits = gateway.config.limits
    return ImageAllowance(limits.max_images_per_request, limits.max_image_bytes)


def is_of_base_model(sent: SentVerb) -> bool:
    return sent.verb == "forward_only" and sent.fields.get("adapter_name") in (None, "")


def _number(fields: Mapping[str, Any]) -> int | None:
    number = fields.get("seq_id")
    if number is None or (type(number) is int and 1 <= number < 2**62):
        return number
    raise MalformedRequestError(f"seq_id: got {str(number)[:40]}, allowed: 1 and up, or none")
