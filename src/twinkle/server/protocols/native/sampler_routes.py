"""Sampling in our own protocol. Every route names the model in its path, which may hold slashes."""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial

from fastapi import Request, Response

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
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.http.owners import always_streams, by_base_model, by_sampled_weights
from twinkle.server.http.requests import PREFIX
from twinkle.server.http.routes import Call, Routes, json_body, raw_body, unread_body
from twinkle.server.http.streams import LINES, begun, unless_gone
from twinkle.server.protocols.native.requests import ANY_KEY, ROWS_BYTES, services_of, session_of, wire_response
from twinkle.server.protocols.native.sampling import (
    FeatureSampling,
    choose_template,
    chosen_template,
    encoded,
    sampling_params,
    target_of,
)
from twinkle.server.types import SessionRecord
from twinkle.server.verbs.templates import SetTemplate
from twinkle.server.wire import fields
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
    _services(call.gateway, model)
    return wire_response(SamplerCreateResponse())


@routes.post("/set_template", by_base_model, raw_body(SetTemplate))
async def set_template(call: Call[bytes], model: str) -> Response:
    session_id = await session_of(call)
    gateway, services = call.gateway, _services(call.gateway, model)
    choice = fields.parse(SetTemplate, call.body).choice(services.model)
    # What cannot be built is refused now.
    await gateway.tenants.pools.text.in_thread(call.tenant_id, partial(services.native.templates.get, choice))
    session = await gateway.session(session_id, call.tenant_id)
    await choose_template(gateway.store, session, services.model, choice)
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
    _services(call.gateway, model)
    raise UnsupportedError(
        "add_adapter_to_sampler: a sampler has no adapters of its own; sample with the adapter_name of one that was"
        " added to the model, or with the adapter_uri of a checkpoint"
    )


@routes.post("/apply_patch", by_base_model, unread_body())
async def apply_patch(call: Call[bytes], model: str) -> Response:
    _services(call.gateway, model)
    raise UnsupportedError("apply_patch: samplers are shared, and nobody may change their code")


class AskedSamples:
    """A request to sample, before it is known from which weights."""

    def __init__(
        self,
        gateway: Gateway,
        services: Services,
        tenant_id: str,
        session: SessionRecord | None,
        wanted: SampleRequest,
    ) -> None:
        self._gateway = gateway
        self._services = services
        self._tenant_id = tenant_id
        self._session = session
        self._wanted = wanted
        self._params = sampling_params(wanted.sampling_params, wanted.num_samples)

    @classmethod
    async def of_call(cls, call: Call[SampleRequest], model: str) -> "AskedSamples":
        """Find the sampler, and the session if one is named: only adapters and templates need one."""
        services = _services(call.gateway, model)
        session_id = call.request.headers.get(SESSION_HEADER)
        session = None if not session_id else await call.gateway.active_session(session_id, call.tenant_id)
        return cls(call.gateway, services, call.tenant_id, session, call.body)

    async def answer(self) -> bytes:
        for _ in range(_TRIES - 1):
            try:
                return await (await self._understood()).answer()
            except GoneError:
                logger.debug("the adapter trained on: its newest weights are sampled from")
        return await (await self._understood()).answer()

    async def lines(self) -> AsyncGenerator[Line, None]:
        if self._params.num_samples != 1:
            raise InvalidInputError("num_samples", self._params.num_samples, "1: a stream is one sample")
        if self._params.max_tokens == 0:
            raise InvalidInputError("max_tokens", 0, "at least 1: there is nothing to stream")
        codec = self._services.model.text
        if codec is None:
            raise UnsupportedError(f"{self._services.model.name} has no tokenizer, and without one there is no text")
        sampling = await self._understood()
        if len(sampling.features) != 1:
            raise InvalidInputError("inputs", f"{len(sampling.features)} of them", "one: a stream is one sample")
        async with aclosing(sampling.lines(codec)) as lines:
            async for line in lines:
                yield line

    async def _understood(self) -> FeatureSampling:
        """Find the template, the inputs, and last the weights, which are to be those of now."""
        gateway, model, wanted = self._gateway, self._services.model, self._wanted
        choice = chosen_template(self._session, model)
        text = gateway.tenants.pools.text
        template = await text.in_thread(self._tenant_id, partial(self._services.native.templates.get, choice))
        assert self._services.sampling is not None, "checked before"
        self._services.sampling.admission.check(self._tenant_id)  # before the work of reading the inputs
        most = max_characters(model.max_context_length)
        read = partial(encoded, wanted.inputs, template, self._params, most)
        features = await text.in_thread(self._tenant_id, read)
        target = await target_of(
            gateway, self._services, self._tenant_id, self._session, wanted.adapter_uri, wanted.adapter_name
        )
        return FeatureSampling(
            request_id=f"sample-{secrets.token_hex(12)}",
            text=text,
            sampling=gateway.sampler_of(target.session),
            session=target.session,
            template=template,
            features=features,
            params=self._params,
            most_bytes=gateway.config.limits.max_json_result_bytes,
        )


def _services(gateway: Gateway, model: str) -> Services:
    services = services_of(gateway, model)
    if services.sampling is None:
        raise NotFoundError("sampler", model)
    return services


def _failed(request: Request, error: Exception) -> Line:
    if not isinstance(error, UserError | TwinkleServerError):
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return {"error": str(error) if isinstance(error, TwinkleError) else "internal error"}
