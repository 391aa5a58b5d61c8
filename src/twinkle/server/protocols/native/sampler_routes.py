"""Sampling in our own protocol. Every route names the model in its path, which may hold slashes."""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from twinkle.data_format import SamplingParams
from twinkle.errors import (
    GoneError,
    InvalidInputError,
    NotFoundError,
    TwinkleError,
    TwinkleServerError,
    UnsupportedError,
    UserError,
)
from twinkle.server.backends.text_codec import max_characters
from twinkle.server.gateway.gateway import Services
from twinkle.server.gateway.sampling_targets import SAMPLED_KINDS, Target, of_base_model, of_checkpoint, of_live_run
from twinkle.server.http.owners import always_streams, by_base_model, by_sampled_weights
from twinkle.server.http.requests import PREFIX
from twinkle.server.http.routes import Call, Routes, json_body, raw_body, unread_body
from twinkle.server.http.streams import LINES, begun, unless_gone
from twinkle.server.ids import CheckpointPath, native_run_id
from twinkle.server.protocols.native.requests import (
    ANY_KEY,
    ROWS_BYTES,
    sampling_services_of,
    session_of,
    usable_template,
    wire_response,
)
from twinkle.server.protocols.native.sampling import (
    TEMPLATES_KEY,
    FeatureSampling,
    chosen_template,
    encoded,
    sampling_params,
)
from twinkle.server.types import SessionRecord
from twinkle.server.verbs.templates import SetTemplate
from twinkle_client.protocol.base import SESSION_HEADER
from twinkle_client.protocol.sampling import SamplerCreateResponse, SampleRequest, SamplerSetTemplateResponse

logger = logging.getLogger(__name__)
routes = Routes(f"{PREFIX}/sampler/{{model:path}}/twinkle", key_prefix=ANY_KEY)

Line = Mapping[str, object]

# An adapter may train on, and on, between being asked for and being sampled from.
_TRIES = 3


@routes.post("/create", by_base_model, raw_body())
async def create(call: Call[bytes], model: str) -> Response:
    """Tell a client that it will be answered: samplers are there from the beginning."""
    sampling_services_of(call.gateway, model)
    return wire_response(SamplerCreateResponse())


@routes.post("/set_template", by_base_model, json_body(SetTemplate))
async def set_template(call: Call[SetTemplate], model: str) -> Response:
    session_id, services = await session_of(call), sampling_services_of(call.gateway, model)
    choice = await usable_template(call.gateway, call.tenant_id, services, call.body)
    await call.gateway.store.sessions.note(session_id, TEMPLATES_KEY, services.model.name, choice.model_dump())
    return wire_response(SamplerSetTemplateResponse())


@routes.post("/sample", by_sampled_weights, json_body(SampleRequest, ROWS_BYTES), ends_with_client=True)
async def sample(call: Call[SampleRequest], model: str) -> Response:
    asked = await AskedSamples.of_call(call, model)
    return Response(await unless_gone(call.request.receive, asked.answer()), media_type="application/json")


@routes.post(
    "/sample_stream",
    by_sampled_weights,
    json_body(SampleRequest, ROWS_BYTES),
    ends_with_client=True,
    streams=always_streams,
)
async def sample_stream(call: Call[SampleRequest], model: str) -> Response:
    """Send the text of one sample of one input as it comes: lines of JSON."""
    lines = (await AskedSamples.of_call(call, model)).lines()
    return await begun(call.request, lines, LINES, partial(_failed, call.request))


@routes.post("/add_adapter_to_sampler", by_base_model, unread_body())
async def add_adapter_to_sampler(call: Call[bytes], model: str) -> Response:
    sampling_services_of(call.gateway, model)
    raise UnsupportedError(
        "add_adapter_to_sampler: a sampler has no adapters of its own; sample with the adapter_name of one that was"
        " added to the model, or with the adapter_uri of a checkpoint"
    )


@routes.post("/apply_patch", by_base_model, unread_body())
async def apply_patch(call: Call[bytes], model: str) -> Response:
    sampling_services_of(call.gateway, model)
    raise UnsupportedError("apply_patch: samplers are shared, and nobody may change their code")


@dataclass(frozen=True)
class AskedSamples:
    """A request to sample, before it is known from which weights. ``session``: that of its header, if it has one."""

    call: Call[SampleRequest]
    services: Services
    session: SessionRecord | None
    params: SamplingParams

    @classmethod
    async def of_call(cls, call: Call[SampleRequest], model: str) -> "AskedSamples":
        """Find the sampler, and the session if one is named: only adapters and templates need one."""
        services = sampling_services_of(call.gateway, model)
        session_id = call.request.headers.get(SESSION_HEADER)
        session = None if not session_id else await call.gateway.active_session(session_id, call.tenant_id)
        params = sampling_params(call.body.sampling_params, call.body.num_samples)
        return cls(call, services, session, params)

    async def answer(self) -> bytes:
        for _ in range(_TRIES - 1):
            try:
                return await (await self.understood()).answer()
            except GoneError:
                logger.debug("the adapter trained on: its newest weights are sampled from")
        return await (await self.understood()).answer()

    async def lines(self) -> AsyncGenerator[Line, None]:
        if self.params.num_samples != 1:
            raise InvalidInputError("num_samples", self.params.num_samples, "1: a stream is one sample")
        if self.params.max_tokens == 0:
            raise InvalidInputError("max_tokens", 0, "at least 1: there is nothing to stream")
        sampling = await self.understood()
        if len(sampling.features) != 1:
            raise InvalidInputError("inputs", f"{len(sampling.features)} of them", "one: a stream is one sample")
        async with aclosing(sampling.lines()) as lines:
            async for line in lines:
                yield line

    async def understood(self) -> FeatureSampling:
        """Find the template, the inputs, and last the weights, which are to be those of now."""
        gateway, tenant_id, services = self.call.gateway, self.call.tenant_id, self.services
        text = gateway.tenants.pools.text
        choice = chosen_template(self.session, services.model)
        template = await text.in_thread(tenant_id, partial(services.native.templates.get, choice))
        assert services.sampling is not None, "checked before"
        services.sampling.admission.check(tenant_id)  # before the work of reading the inputs
        most = max_characters(services.model.max_context_length)
        features = await text.in_thread(tenant_id, partial(encoded, self.call.body.inputs, template, self.params, most))
        return FeatureSampling(
            request_id=f"sample-{secrets.token_hex(12)}",
            text=text,
            target=await self._target(),
            template=template,
            features=features,
            params=self.params,
            most_bytes=gateway.config.limits.max_json_result_bytes,
        )

    async def _target(self) -> Target:
        """Find the weights that are meant: those at an address, those of an adapter of the session, or the base's."""
        gateway, tenant_id, services = self.call.gateway, self.call.tenant_id, self.services
        uri, name = self.call.body.adapter_uri, self.call.body.adapter_name
        if uri:
            path = CheckpointPath.parse(uri, "adapter_uri")
            if path.kind not in SAMPLED_KINDS:
                raise InvalidInputError("adapter_uri", uri, f"a checkpoint of kind {' or '.join(SAMPLED_KINDS)}")
            target = await of_checkpoint(gateway, await gateway.checkpoint(path, tenant_id), tenant_id)
            if target.services is not services:
                raise InvalidInputError("adapter_uri", uri, f"a checkpoint of {services.model.name}")
            return target
        if not name:
            return of_base_model(gateway, services, tenant_id, services.model.name)
        if self.session is None:
            raise InvalidInputError(f"{SESSION_HEADER} header", None, f"the session of adapter {name!r}")
        run = services.training.run(native_run_id(self.session.session_id, name))
        live = None if run is None or run.tenant_id != tenant_id else await of_live_run(gateway, run, tenant_id)
        if live is None:
            raise NotFoundError("adapter", name)
        return live


def _failed(request: Request, error: Exception) -> Line:
    if not isinstance(error, UserError | TwinkleServerError):
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return {"error": str(error) if isinstance(error, TwinkleError) else "internal error"}
