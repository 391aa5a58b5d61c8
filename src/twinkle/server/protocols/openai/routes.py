"""OpenAI's chat and text completions, under the path that its clients use and under the prefix of our other routes.

Errors have this protocol's form: ``{"error": {"message", "type", "param", "code"}}`` and a status code.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from fastapi import Request, Response

from twinkle.errors import InvalidInputError, QuotaError, TwinkleError, UnauthorizedError, UserError
from twinkle.images import SentImages
from twinkle.server.backends.text_codec import TextCodec
from twinkle.server.gateway.sampling_targets import Target
from twinkle.server.http.owners import anybody, by_openai_model, streams_if_asked
from twinkle.server.http.requests import PREFIX, json_response, note_refusal, status_of, when_to_retry
from twinkle.server.http.routes import Body, Call, Decorator, Routes, json_body
from twinkle.server.http.streams import EVENTS, begun_or_commented, unless_gone
from twinkle.server.protocols.openai import models
from twinkle.server.protocols.openai.answers import ChatFormat, CompletionFormat, OpenAiFormat
from twinkle.server.protocols.openai.generation import (
    EncodedPrompt,
    Generation,
    check_length,
    files_of,
    target_of,
    with_images,
)
from twinkle.server.protocols.openai.requests import (
    CHAT_BYTES,
    TEXT_BYTES,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Prompt,
    read_chat,
)
from twinkle.server.wire.errors import BodyTooLargeError, MalformedRequestError
from twinkle.server.wire.fields import parse

logger = logging.getLogger(__name__)

FieldsT = TypeVar("FieldsT", bound=GenerationFields)
_MAX_CHOICES = 1024
# The sampler's names of parameters that have another name in this protocol.
_PARAMS = {"num_samples": "n", "topk_sample_logprobs": "top_logprobs", "stop_strings": "stop", "stop_tokens": "stop"}
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


# --- errors -----------------------------------------------------------------------------------------------------------


def _error_answer(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> tuple[int, dict[str, object]]:
    """Return the status and the body of an error."""
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _refusal(error: Exception, request: Request) -> tuple[int, dict[str, object]]:
    """Return the status and the body of the answer to an error. An unexpected error is answered without details."""
    note_refusal(error)
    text = str(error)
    match error:
        case UnauthorizedError():
            return _error_answer(401, text, code="invalid_api_key")
        case models.ModelNotFoundError():
            return _error_answer(404, text, param="model", code="model_not_found")
        case BodyTooLargeError():
            return _error_answer(413, text)
        case QuotaError():
            return _error_answer(429, text, "rate_limit_error", code="rate_limit_exceeded")
        case TwinkleError() if status_of(error) in (410, 503):  # a retry may succeed
            return _error_answer(503, text, "server_error")
        case MalformedRequestError():
            return _error_answer(400, text, param=error.field or None, code=_CODES.get(error.problem, "invalid_value"))
        case InvalidInputError():
            renamed = error.renamed(_PARAMS.get(error.field, error.field))
            return _error_answer(400, str(renamed), param=renamed.field, code="invalid_value")
        case UserError():
            return _error_answer(400, text, code=error.code)
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_answer(500, "internal error; the server's log has the details", "server_error")


def _answer_error(request: Request, error: Exception) -> Response:
    status, body = _refusal(error, request)
    return json_response(body, status, when_to_retry(error, status))


# --- routes -----------------------------------------------------------------------------------------------------------

# Clients of this protocol send keys of any form. In open mode each key is a tenant; otherwise the server must know it.
routes = Routes(key_prefix="", answer_error=_answer_error)


def _generating(path: str, body: Body[FieldsT]) -> Decorator[FieldsT]:
    """Declare a route that generates text. The generation is cancelled when its client disconnects."""
    return routes.post(path, by_openai_model, body, ends_with_client=True, streams=streams_if_asked)


_CHAT = Body(partial(read_chat, partial(parse, ChatRequest)), ChatRequest, CHAT_BYTES)
_PROMPTS = json_body(CompletionRequest, TEXT_BYTES)


@_generating("/v1/chat/completions", _CHAT)
@_generating(f"{PREFIX}/chat/completions", _CHAT)
async def chat_completions(call: Call[ChatRequest]) -> Response:
    target = await target_of(call)
    # In a thread, even for a short chat: the first use of a template compiles it, which takes milliseconds.
    encode = partial(_chat, call, target)
    tokens, images = await call.gateway.tenants.pools.text.in_thread(call.tenant_id, encode)
    prompt = await with_images(target, tokens, images)
    return await _answer(call, target, [prompt], ChatFormat, tools=bool(call.body.offered_tools))


def _chat(call: Call[ChatRequest], target: Target) -> tuple[list[int], SentImages]:
    """Return the tokens of a chat, and its images."""
    wanted = call.body
    images = files_of(call, target, wanted.image_uris)
    messages = [message.for_template() for message in wanted.messages]
    tools = [tool.for_template() for tool in wanted.offered_tools]
    return target.codec.encode_chat(messages, tools), images


@_generating("/v1/completions", _PROMPTS)
@_generating(f"{PREFIX}/completions", _PROMPTS)
async def completions(call: Call[CompletionRequest]) -> Response:
    target = await target_of(call)
    encode = partial(_encoded, target.codec, call.body.prompt)
    prompts = await call.gateway.tenants.pools.text.in_thread(call.tenant_id, encode)
    return await _answer(call, target, prompts, CompletionFormat)


@routes.get("/v1/models", anybody)
@routes.get(f"{PREFIX}/models", anybody)
async def list_models(call: Call[bytes]) -> Response:
    return json_response({"object": "list", "data": await models.listed(call.gateway, call.tenant_id)})


@routes.get("/v1/models/{model:path}", by_openai_model)
@routes.get(f"{PREFIX}/models/{{model:path}}", by_openai_model)
async def model(call: Call[bytes], model: str) -> Response:
    return json_response(await models.described(call.gateway, model, call.tenant_id))


def _encoded(codec: TextCodec, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
    return [EncodedPrompt(codec.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts]


async def _answer(
    call: Call[FieldsT],
    target: Target,
    prompts: Sequence[EncodedPrompt],
    form: type[OpenAiFormat],
    *,
    tools: bool = False,
) -> Response:
    """Generate the answer, and send it whole or as a stream."""
    wanted, request = call.body, call.request
    _check_choices(len(prompts), wanted.samples)
    check_length(prompts, target)
    text = call.gateway.tenants.pools.text
    generation = Generation(wanted, prompts, form(wanted, target), target, text, tools, chat=form is ChatFormat)
    if not wanted.stream:
        return Response(await unless_gone(request.receive, generation.answer()), media_type="application/json")
    return await begun_or_commented(
        request, generation.chunks(), EVENTS, lambda error: _refusal(error, request)[1], generation.waiting_for
    )


def _check_choices(prompts: int, samples: int) -> None:
    if prompts * samples > _MAX_CHOICES:
        raise InvalidInputError("n", f"{samples} for each of {prompts} prompts", f"{_MAX_CHOICES} choices in all")
