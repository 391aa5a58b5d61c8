"""Sampling in our own protocol. Every route names the model in its path, which may hold slashes."""

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from twinkle.errors import (
    GoneError,
    InvalidInputError,
    NotFoundError,
    TwinkleError,
    TwinkleServerError,
    UnsupportedError,
    UserError,
)
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.http.body_limits import upload_of
from twinkle.server.http.requests import JSON_BYTES, PREFIX, SMALL_BODY, body_of, gateway_of
from twinkle.server.http.streams import LINES, JsonStream, unless_gone
from twinkle.server.protocols.native.gateway_routes import wire_response
from twinkle.server.protocols.native.requests import (
    ROWS_BYTES,
    SESSION_HEADER,
    caller_of,
    native_tenant_of,
    services_of,
)
from twinkle.server.protocols.native.sampling import (
    FeatureSampling,
    choose_template,
    chosen_template,
    encoded,
    sampling_params,
    target_of,
)
from twinkle.server.tenancy.text_sizes import max_characters
from twinkle.server.types import SessionRecord
from twinkle.server.verbs.templates import SetTemplate
from twinkle.server.wire import fields
from twinkle_client import types

logger = logging.getLogger(__name__)
router = APIRouter(prefix=f"{PREFIX}/sampler/{{model:path}}/twinkle")

BodyT = TypeVar("BodyT", bound=BaseModel)
Line = Mapping[str, object]

# An adapter may train on, and on, between being asked for and being sampled from.
_TRIES = 3


@router.post("/create")
async def create(request: Request) -> Response:
    """Samplers are there from the beginning: this tells a client that it will be answered."""
    await native_tenant_of(request)
    _services(request)
    await body_of(request, JSON_BYTES)
    return wire_response(types.SamplerCreateResponse())


@router.post("/set_template")
async def set_template(request: Request) -> Response:
    caller = await caller_of(request)
    gateway, services = gateway_of(request), _services(request)
    model = services.model
    choice = (await _read(SetTemplate, request, JSON_BYTES)).choice(model)
    text = gateway.tenants.pools.text
    # What cannot be built is refused now.
    await text.in_thread(caller.tenant_id, partial(services.templates.get, choice))
    await choose_template(gateway.store, await gateway.session(caller.session_id, caller.tenant_id), model, choice)
    return wire_response(types.SamplerSetTemplateResponse())


@router.post("/sample")
async def sample(request: Request) -> Response:
    asked = await AskedSamples.read(request)
    return Response(await unless_gone(request.receive, asked.answer()), media_type="application/json")


@router.post("/sample_stream")
async def sample_stream(request: Request) -> Response:
    """Of one input, the text of one sample as it comes: lines of JSON."""
    asked = await AskedSamples.read(request)
    lines = asked.lines()
    # What is refused is refused by status code: the stream begins with the first text.
    first = await unless_gone(request.receive, _next(lines))
    return JsonStream(_to_the_end(first, lines, request), LINES)


@router.post("/add_adapter_to_sampler")
async def add_adapter_to_sampler(request: Request) -> Response:
    await native_tenant_of(request)
    _services(request)
    raise UnsupportedError(
        "add_adapter_to_sampler: a sampler has no adapters of its own; sample with the adapter_name of one that was"
        " added to the model, or with the adapter_uri of a checkpoint"
    )


@router.post("/apply_patch")
async def apply_patch(request: Request) -> Response:
    await native_tenant_of(request)
    _services(request)
    raise UnsupportedError("apply_patch: samplers are shared, and nobody may change their code")


class AskedSamples:
    """A request to sample, until its weights are known."""

    def __init__(
        self,
        gateway: Gateway,
        services: Services,
        tenant_id: str,
        session: SessionRecord | None,
        wanted: types.SampleRequest,
    ) -> None:
        self._gateway = gateway
        self._services = services
        self._tenant_id = tenant_id
        self._session = session
        self._wanted = wanted
        self._params = sampling_params(wanted.sampling_params, wanted.num_samples)

    @classmethod
    async def read(cls, request: Request) -> "AskedSamples":
        tenant_id = await native_tenant_of(request)
        services = _services(request)
        session = await _session(request, tenant_id)
        wanted = await _read(types.SampleRequest, request, ROWS_BYTES)
        return cls(gateway_of(request), services, tenant_id, session, wanted)

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
        """The weights last: they are to be those of now."""
        gateway, model, wanted = self._gateway, self._services.model, self._wanted
        choice = chosen_template(self._session, model)
        text = gateway.tenants.pools.text
        template = await text.in_thread(self._tenant_id, partial(self._services.templates.get, choice))
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


def _services(request: Request) -> Services:
    name: str = request.path_params["model"]
    services = services_of(gateway_of(request), name)
    if services.sampling is None:
        raise NotFoundError("sampler", name)
    return services


async def _session(request: Request, tenant_id: str) -> SessionRecord | None:
    """The one that the request names, if it does: only adapters and templates need one."""
    session_id = request.headers.get(SESSION_HEADER)
    return None if not session_id else await gateway_of(request).active_session(session_id, tenant_id)


async def _read(body_type: type[BodyT], request: Request, most: int) -> BodyT:
    body = await body_of(request, most)
    if len(body) < SMALL_BODY:
        return fields.parse(body_type, body)
    tenant_id = upload_of(request).tenant_id
    return await gateway_of(request).reading.in_thread(tenant_id, partial(fields.parse, body_type, body))


async def _next(lines: AsyncGenerator[Line, None]) -> Line:
    return await anext(lines)


async def _to_the_end(first: Line, lines: AsyncGenerator[Line, None], request: Request) -> AsyncGenerator[Line, None]:
    """An error on the way is a line, and the last one."""
    async with aclosing(lines):
        yield first
        try:
            async for line in lines:
                yield line
        except Exception as error:  # the route handler is an edge
            if not isinstance(error, UserError | TwinkleServerError):
                logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
            yield {"error": str(error) if isinstance(error, TwinkleError) else "internal error"}
