"""Sampling in the native protocol: the routes, reading the inputs, finding the weights, and writing the answer.

Every route has the name of the model in its path; the name may contain slashes.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from fastapi import Request, Response

from twinkle.data_format import SampledSequence, SamplingParams
from twinkle.errors import (
    GoneError,
    InvalidInputError,
    NotFoundError,
    TwinkleError,
    TwinkleServerError,
    UnsupportedError,
    UserError,
)
from twinkle.sampler.script.features import engine_request, response_of, sequence_of
from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.text_codec import max_characters
from twinkle.server.gateway.fleet import Services
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.sampling_targets import SAMPLED_KINDS, Target, of_base_model, of_checkpoint, of_live_run
from twinkle.server.http.owners import always_streams, by_base_model, by_sampled_weights
from twinkle.server.http.requests import PREFIX
from twinkle.server.http.routes import Body, Call, Routes, json_body, raw_body, unread_body
from twinkle.server.http.streams import LINES, begun, unless_gone
from twinkle.server.ids import CheckpointPath, native_run_id
from twinkle.server.protocols.native.requests import (
    ANY_KEY,
    TEMPLATES_KEY,
    image_allowance,
    sampling_services_of,
    session_of,
    usable_template,
    wire_response,
)
from twinkle.server.protocols.native.sampled_inputs import Row, SampledInput, encoded, read_sample
from twinkle.server.protocols.openai.choices import Choice
from twinkle.server.types import SessionRecord
from twinkle.server.verbs.codec import finite
from twinkle.server.verbs.templates import SamplingTemplate, SetTemplate, TemplateChoice
from twinkle.server.wire.fields import MAX_STOP_LENGTH, MAX_STOPS
from twinkle.server.wire.number_arrays import ROUTES, packed_routes
from twinkle_client.protocol import sampling as types
from twinkle_client.protocol.base import SESSION_HEADER

logger = logging.getLogger(__name__)
routes = Routes(f"{PREFIX}/sampler/{{model:path}}/twinkle", key_prefix=ANY_KEY)

Line = Mapping[str, object]

_SAMPLE = Body(read_sample, types.SampleRequest, limit=None)
_CELL_BYTES = 28  # about what a token and its log-probability take in JSON

# An adapter may be trained further, and its version dropped, after a request has found that version and before it
# samples from it. Then the request tries again with the newest version.
_TRIES = 3


@routes.post("/create", by_base_model, raw_body())
async def create(call: Call[bytes], model: str) -> Response:
    """Return success if the model is served for sampling. Nothing is created: the sampler exists from the start."""
    sampling_services_of(call.gateway, model)
    return wire_response(types.SamplerCreateResponse())


@routes.post("/set_template", by_base_model, json_body(SetTemplate))
async def set_template(call: Call[SetTemplate], model: str) -> Response:
    session_id, services = await session_of(call), sampling_services_of(call.gateway, model)
    choice = await usable_template(call.gateway, call.tenant_id, services, call.body)
    await call.gateway.store.sessions.remember(session_id, TEMPLATES_KEY, services.model.name, choice.model_dump())
    return wire_response(types.SamplerSetTemplateResponse())


@routes.post("/sample", by_sampled_weights, _SAMPLE, ends_with_client=True)
async def sample(call: Call[types.SampleRequest], model: str) -> Response:
    asked = await AskedSamples.of_call(call, model)
    return Response(await unless_gone(call.request.receive, asked.answer()), media_type="application/json")


@routes.post(
    "/sample_stream",
    by_sampled_weights,
    _SAMPLE,
    ends_with_client=True,
    streams=always_streams,
)
async def sample_stream(call: Call[types.SampleRequest], model: str) -> Response:
    """Stream the text of one sample of one input, as lines of JSON."""
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
    """A request for samples, before its weights are found. ``session``: the one in its header, if it has one."""

    call: Call[types.SampleRequest]
    services: Services
    session: SessionRecord | None
    params: SamplingParams

    @classmethod
    async def of_call(cls, call: Call[types.SampleRequest], model: str) -> "AskedSamples":
        """Find the services and the session of a request. Only adapters and templates need a session."""
        services = sampling_services_of(call.gateway, model)
        session_id = call.request.headers.get(SESSION_HEADER)
        session = None if not session_id else await call.gateway.active_session(session_id, call.tenant_id)
        params = sampling_params(call.body.sampling_params, call.body.num_samples)
        return cls(call, services, session, params)

    async def answer(self) -> bytes:
        """Return the whole answer as JSON."""
        for _ in range(_TRIES - 1):
            try:
                return await (await self.understood()).answer()
            except GoneError:
                logger.debug("the adapter has been trained further: sampling from its newest weights instead")
        return await (await self.understood()).answer()

    async def lines(self) -> AsyncGenerator[Line, None]:
        """Yield the lines of a stream; InvalidInputError unless one sample of one input is asked for."""
        if self.params.num_samples != 1:
            raise InvalidInputError("num_samples", self.params.num_samples, "1: a stream is one sample")
        if self.params.max_tokens == 0:
            raise InvalidInputError("max_tokens", 0, "at least 1: there is nothing to stream")
        request = await self.understood()
        if len(request.inputs) != 1:
            raise InvalidInputError("inputs", f"{len(request.inputs)} of them", "one: a stream is one sample")
        async with aclosing(request.lines()) as lines:
            async for line in lines:
                yield line

    async def understood(self) -> "FeatureSampling":
        """Find the template, encode the inputs, and find the weights last, so that they are the newest ones."""
        gateway, tenant_id, services = self.call.gateway, self.call.tenant_id, self.services
        text = gateway.tenants.pools.text
        choice = chosen_template(self.session, services.model)
        template = await text.in_thread(tenant_id, partial(services.native.templates.get, choice))
        assert services.sampling is not None, "checked before"
        services.sampling.admission.check(tenant_id)  # refuse before the work of encoding the inputs
        most = max_characters(services.model.max_context_length)
        left = image_allowance(gateway)
        encode = partial(encoded, self.call.body.inputs, template, self.params, most, left)
        inputs = await text.in_thread(tenant_id, encode)
        asked = FeatureSampling(gateway, self.params, template, inputs, await self._target())
        return await asked.with_images() if any(each.sent for each in inputs) else asked

    async def _target(self) -> Target:
        """Find the weights to sample from: a checkpoint's, those of an adapter of the session, or the base model's."""
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
        own = services.training.adapters.get(native_run_id(self.session.session_id, name))
        live = None if own is None or own.run.tenant_id != tenant_id else await of_live_run(gateway, own.run, tenant_id)
        if live is None:
            raise NotFoundError("adapter", name)
        return live


def _failed(request: Request, error: Exception) -> Line:
    if not isinstance(error, UserError | TwinkleServerError):
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return {"error": str(error) if isinstance(error, TwinkleError) else "internal error"}


# --- inputs -----------------------------------------------------------------------------------------------------------


def sampling_params(given: Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    """Return the sampling parameters. The separate ``num_samples`` counts if ``given`` does not have one."""
    named = dict(given or {})
    if named.get("num_samples") is None:
        named["num_samples"] = 1 if num_samples is None else num_samples
    params = SamplingParams.from_dict(named)
    stops = [*params.stop_strings, *params.stop_token_ids]
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in params.stop_strings):
        allowed = f"at most {MAX_STOPS} texts or token ids; texts of 1 to {MAX_STOP_LENGTH} characters"
        raise InvalidInputError("stop", stops[:8], allowed)
    return params


def chosen_template(session: SessionRecord | None, model: ServedModel) -> TemplateChoice:
    """Return the template that a session chose for sampling from a model; the default one if it chose none."""
    choices = {} if session is None else session.user_metadata.get(TEMPLATES_KEY, {})
    assert isinstance(choices, Mapping), "we wrote it"
    choice = choices.get(model.name)
    return TemplateChoice() if choice is None else TemplateChoice.model_validate(choice)


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureSampling:
    """A request for samples that is ready to run: its inputs are encoded and its weights are found."""

    gateway: Gateway
    params: SamplingParams
    template: SamplingTemplate
    inputs: Sequence[SampledInput]
    target: Target
    request_id: str = field(default_factory=lambda: f"sample-{secrets.token_hex(12)}")

    async def with_images(self) -> "FeatureSampling":
        """Return the request with the images of its inputs placed among their tokens, and decoded."""
        sent = [each.sent for each in self.inputs]
        requests = self._requests(stream=False)
        read, pixels = await self.target.sampling.read_all_images(self.target.session, requests, sent)
        reader = self.target.services.model.images
        assert reader is not None, "otherwise the images are refused"
        inputs = [
            each.placed(request.prompt, request.images, seen, reader.merge) if each.sent else each
            for each, request, seen in zip(self.inputs, read, pixels, strict=True)
        ]
        return replace(self, inputs=inputs)

    async def answer(self) -> bytes:
        """Return the JSON of a SampleResponseModelList."""
        requests = self._requests(stream=False)
        self._check_size(sum(len(request.prompt) * request.topk_prompt_logprobs for request in requests) * _CELL_BYTES)
        results = await self.target.sampling.results(self.target.session, requests, self._pixels)
        parts: list[bytes] = []
        size = 0
        # One input at a time, each as its own job in the pool: writing JSON blocks all other threads.
        for each, result in zip(self.inputs, results, strict=True):
            encode = partial(self._encode, each.feature, result, size)
            parts.append(await self.gateway.tenants.pools.text.in_thread(self.target.session.tenant_id, encode))
            size += len(parts[-1])
        return b'{"samples":[' + b",".join(parts) + b"]}"

    async def lines(self) -> AsyncGenerator[Mapping[str, object], None]:
        """Yield the text of the only sample of the only input, as it becomes final."""
        choice = Choice(self.target.codec, self.params.stop_strings, tools=False)
        generated = self.target.sampling.generate(self.target.session, self._requests(stream=True), self._pixels)
        async with aclosing(generated) as items:
            async for _, item in items:
                if isinstance(item, SampleResult):
                    continue
                delta = choice.push(item)
                if delta.text or delta.finish_reason:
                    yield {"delta": delta.text, "finish_reason": delta.finish_reason}

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        version = self.target.session.version_id
        return [
            engine_request(
                each.feature,
                self.params,
                index,
                version,
                f"{self.request_id}-{index}",
                stream=stream,
                images=each.images,
            )
            for index, each in enumerate(self.inputs)
        ]

    @property
    def _pixels(self) -> list[int]:
        return [each.pixels for each in self.inputs]

    def _encode(self, feature: Row, result: SampleResult, size: int) -> bytes:
        """Return the JSON of one input's samples. Runs in a thread. ``size``: bytes of the answer so far."""
        parts: list[bytes] = []
        for part in _encoded(self.template, feature, result, self.params):
            parts.append(part)
            size += len(part)
            self._check_size(size)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        """Raise InvalidInputError if an answer of ``size`` bytes is too large."""
        most = self.gateway.config.limits.max_json_result_bytes
        if size > most:
            allowed = (
                f"fewer inputs, samples or log-probabilities: the answer has {size} bytes or more, "
                f"allowed are {most} (max_json_result_bytes)"
            )
            raise InvalidInputError("inputs", f"{len(self.inputs)} inputs", allowed)


def _encoded(template: SamplingTemplate, feature: Row, result: SampleResult, params: SamplingParams) -> Iterator[bytes]:
    """Yield the JSON of a SampleResponseModel, one sample at a time. NaN and infinity become null."""
    yield b'{"sequences":['
    for number, sequence in enumerate(result.sequences):
        yield b"," * (number > 0) + _sequence(sequence_of(template, feature, sequence, params))
    response = response_of(template, feature, replace(result, sequences=[]), params)
    rest = types.SampleResponseModel(
        sequences=[], prompt_logprobs=response.prompt_logprobs, topk_prompt_logprobs=response.topk_prompt_logprobs
    )
    yield b"]," + rest.model_dump_json(exclude={"sequences"}).encode().removeprefix(b"{")


def _sequence(sequence: SampledSequence) -> bytes:
    routed = sequence.routed_experts is not None
    model = types.SampledSequenceModel(
        stop_reason=sequence.stop_reason,
        tokens=sequence.tokens,
        logprobs=cast("list[list[tuple[int, float]] | None] | None", sequence.logprobs),
        decoded=sequence.decoded,
        new_input_feature=cast("dict[str, Any]", finite(_with_packed_routes(sequence))),
        routed_experts=None if sequence.routed_experts is None else packed_routes(sequence.routed_experts),
    )
    return model.model_dump_json(exclude=None if routed else {"routed_experts"}).encode()


def _with_packed_routes(sequence: SampledSequence) -> Mapping[str, Any] | None:
    """Return the feature of a sample for the next pass; its routes, if it has some, are packed."""
    feature = sequence.new_input_feature
    if feature is None or sequence.routed_experts is None:
        return feature
    return {**feature, ROUTES: packed_routes(sequence.routed_experts)}
