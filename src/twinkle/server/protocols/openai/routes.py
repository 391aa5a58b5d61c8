"""OpenAI's chat and text completions, under the path that its clients use and beside our other routes."""

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from twinkle.errors import TwinkleError, UnsupportedError
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.gateway.sampling_targets import Target
from twinkle.server.http.owners import anybody, by_openai_model, streams_if_asked
from twinkle.server.http.requests import (
    JSON_BYTES,
    PREFIX,
    body_of,
    decoded,
    gateway_of,
    json_response,
    note_refusal,
    tenant_of,
    when_to_retry,
)
from twinkle.server.http.routes import RouteFacts, Routes
from twinkle.server.http.streams import EVENTS, begun, unless_gone
from twinkle.server.protocols.openai import models
from twinkle.server.protocols.openai.bodies import ChatFormat, CompletionFormat, Format
from twinkle.server.protocols.openai.errors import INTERNAL, Refusal, RequestError, refusal_of
from twinkle.server.protocols.openai.generation import Generation
from twinkle.server.protocols.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Fields,
    GenerationFields,
    Prompt,
    parse,
)

logger = logging.getLogger(__name__)
routes = Routes()

Handler = Callable[[Request], Awaitable[Response]]
FieldsT = TypeVar("FieldsT", bound=Fields)
_MAX_CHOICES = 1024
_BODY_BYTES = 4 * JSON_BYTES


def _generating(schema: type[Fields]) -> RouteFacts:
    """Return what is true of a route that generates: it does so for its client alone."""
    return RouteFacts(by_openai_model, schema, _BODY_BYTES, ends_with_client=True, streams=streams_if_asked)


def _answering(handler: Handler) -> Handler:
    """Wrap a handler: errors are answered in this protocol's form."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - the route handler is an edge
            refusal = _refusal(error, request)
            return json_response(refusal.body, refusal.status, when_to_retry(error, refusal.status))

    return answer


@routes.endpoint("POST", "/v1/chat/completions", _generating(ChatRequest))
@routes.endpoint("POST", f"{PREFIX}/chat/completions", _generating(ChatRequest))
@_answering
async def chat_completions(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await _read(ChatRequest, request)
    target, codec = await _resolve(request, wanted, tenant_id)
    messages = [message.for_template() for message in wanted.messages]
    tools = [tool.for_template() for tool in wanted.offered_tools]
    # In a thread, however short: compiling the template, the first time, takes milliseconds.
    text = gateway_of(request).tenants.pools.text
    tokens = await text.in_thread(tenant_id, functools.partial(codec.encode_chat, messages, tools))
    return await _answer(request, wanted, target, codec, [tokens], ChatFormat, tools=bool(tools))


@routes.endpoint("POST", "/v1/completions", _generating(CompletionRequest))
@routes.endpoint("POST", f"{PREFIX}/completions", _generating(CompletionRequest))
@_answering
async def completions(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    wanted = await _read(CompletionRequest, request)
    target, codec = await _resolve(request, wanted, tenant_id)
    text = gateway_of(request).tenants.pools.text
    tokens = await text.in_thread(tenant_id, functools.partial(_encoded, codec, wanted.prompt))
    return await _answer(request, wanted, target, codec, tokens, CompletionFormat)


@routes.endpoint("GET", "/v1/models", RouteFacts(anybody, ends_with_client=True))
@routes.endpoint("GET", f"{PREFIX}/models", RouteFacts(anybody, ends_with_client=True))
@_answering
async def list_models(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    return json_response({"object": "list", "data": await models.listed(gateway_of(request), tenant_id)})


@routes.endpoint("GET", "/v1/models/{model:path}", RouteFacts(by_openai_model, ends_with_client=True))
@routes.endpoint("GET", f"{PREFIX}/models/{{model:path}}", RouteFacts(by_openai_model, ends_with_client=True))
@_answering
async def model(request: Request) -> Response:
    tenant_id = await tenant_of(request)
    return json_response(await models.described(gateway_of(request), request.path_params["model"], tenant_id))


async def _read(request_type: type[FieldsT], request: Request) -> FieldsT:
    return await decoded(request, await body_of(request, _BODY_BYTES), functools.partial(parse, request_type))


async def _resolve(request: Request, wanted: GenerationFields, tenant_id: str) -> tuple[Target, TextCodec]:
    """Find what to sample from, and refuse what would be refused anyway before the work of reading the text."""
    _ = wanted.params, wanted.top  # raise for values that do not go together
    gateway = gateway_of(request)
    target = await models.resolve(gateway, wanted.model, tenant_id)
    codec = target.services.model.text
    if codec is None:
        raise UnsupportedError(f"{target.services.model.name} has no tokenizer, and without one there is no text")
    gateway.sampler_of(target.session).admission.check(tenant_id)
    return target, codec


def _encoded(codec: TextCodec, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


async def _answer(
    request: Request,
    wanted: GenerationFields,
    target: Target,
    codec: TextCodec,
    prompts: Sequence[Sequence[int]],
    form: type[Format],
    *,
    tools: bool = False,
) -> Response:
    """Generate, and send the answer whole or as it comes."""
    _check_sizes(prompts, wanted.samples, target.services.model.max_context_length)
    gateway = gateway_of(request)
    generation = Generation(
        wanted,
        prompts,
        form(wanted.model, target.weights, codec, logprobs=wanted.top is not None),
        codec,
        target.session,
        gateway.sampler_of(target.session),
        gateway.tenants.pools.text,
        tools,
    )
    if not wanted.stream:
        return Response(await unless_gone(request.receive, generation.answer()), media_type="application/json")
    return await begun(request, generation.chunks(), EVENTS, lambda error: _refusal(error, request).body)


def _check_sizes(prompts: Sequence[Sequence[int]], samples: int, context: int) -> None:
    if len(prompts) * samples > _MAX_CHOICES:
        message = f"n: got {samples} for each of {len(prompts)} prompts, allowed: {_MAX_CHOICES} choices in all"
        raise RequestError(message, "n", "invalid_value")
    longest = max(len(prompt) for prompt in prompts)
    if longest >= context:
        message = f"the prompt has {longest} tokens, allowed: fewer than {context}, the context of this model"
        raise RequestError(message, None, "context_length_exceeded")


def _refusal(error: Exception, request: Request) -> Refusal:
    note_refusal(error)
    refusal = refusal_of(error) if isinstance(error, TwinkleError) else None
    if refusal is None:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return INTERNAL
    return refusal
