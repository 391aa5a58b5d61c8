"""Anthropic's Messages: answers to chats, and the number of tokens of a chat.

Hosted Tinker has these routes under ``/anthropic/api``, which is answered too (``http/older_paths.py``). Errors have
this protocol's form: ``{"type": "error", "error": {"type", "message"}}`` and a status code.
"""

import logging
from functools import partial
from typing import TypeVar

from fastapi import Request, Response

from twinkle.errors import InvalidInputError, TwinkleError
from twinkle.images import SentImages
from twinkle.server.gateway.sampling_targets import Target
from twinkle.server.http.owners import by_openai_model, streams_if_asked
from twinkle.server.http.requests import json_response, note_refusal, status_of, when_to_retry
from twinkle.server.http.routes import Body, Call, Routes
from twinkle.server.http.streams import NAMED_EVENTS, begun_or_commented, unless_gone
from twinkle.server.protocols.anthropic.answers import MessageFormat
from twinkle.server.protocols.anthropic.requests import CountTokensRequest, MessagesRequest
from twinkle.server.protocols.openai.generation import (
    EncodedPrompt,
    Generation,
    check_length,
    files_of,
    target_of,
    with_images,
)
from twinkle.server.protocols.openai.models import ModelNotFoundError
from twinkle.server.protocols.openai.requests import CHAT_BYTES, read_chat
from twinkle.server.wire.fields import parse

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=CountTokensRequest)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# The sampler's name of a parameter that has another name in this protocol.
_PARAMS = {"stop_strings": "stop_sequences"}


# --- errors -----------------------------------------------------------------------------------------------------------


def _refusal(error: Exception, request: Request) -> tuple[int, dict[str, object]]:
    """Return the status and the body of the answer to an error. An unexpected error is answered without details."""
    note_refusal(error)
    status, shown = _status(error), error
    if status == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error_answer(status, "internal error; the server's log has the details")
    if isinstance(error, InvalidInputError):
        shown = error.renamed(_PARAMS.get(error.field, error.field))
    return _error_answer(status, str(shown))


def _status(error: Exception) -> int:
    """Return the status of an error: one of those in ``_TYPES``."""
    if isinstance(error, ModelNotFoundError):
        return 404
    status = status_of(error) if isinstance(error, TwinkleError) else 500
    if status == 410:  # the weights were removed meanwhile: a retry may succeed
        return 503
    return status if status in _TYPES else 500


def _error_answer(status: int, message: str) -> tuple[int, dict[str, object]]:
    return status, {"type": "error", "error": {"type": _TYPES[status], "message": message}}


def _answer_error(request: Request, error: Exception) -> Response:
    status, body = _refusal(error, request)
    return json_response(body, status, when_to_retry(error, status))


# --- routes -----------------------------------------------------------------------------------------------------------

# Clients of this protocol send keys of any form. In open mode each key is a tenant; otherwise the server must know it.
routes = Routes("/anthropic/v1", key_prefix="", answer_error=_answer_error)


@routes.post(
    "/messages",
    by_openai_model,
    Body(partial(read_chat, partial(parse, MessagesRequest)), MessagesRequest, CHAT_BYTES),
    ends_with_client=True,  # the generation is cancelled when its client disconnects
    streams=streams_if_asked,
)
async def messages(call: Call[MessagesRequest]) -> Response:
    wanted, request = call.body, call.request
    target, prompt = await _prompt(call)
    check_length([prompt], target)
    form = MessageFormat(wanted.model, len(prompt.tokens))
    generation = Generation(wanted, [prompt], form, target, call.gateway.tenants.pools.text, wanted.offers_tools)
    if not wanted.stream:
        return Response(await unless_gone(request.receive, generation.answer()), media_type="application/json")
    return await begun_or_commented(
        request, generation.chunks(), NAMED_EVENTS, lambda error: _refusal(error, request)[1], generation.waiting_for
    )


@routes.post(
    "/messages/count_tokens",
    by_openai_model,
    Body(partial(read_chat, partial(parse, CountTokensRequest)), CountTokensRequest, CHAT_BYTES),
)
async def count_tokens(call: Call[CountTokensRequest]) -> Response:
    _, prompt = await _prompt(call)
    return json_response({"input_tokens": len(prompt.tokens)})


async def _prompt(call: Call[RequestT]) -> tuple[Target, EncodedPrompt]:
    """Return the weights to sample from, and the chat as tokens, with its images."""
    target = await target_of(call)
    # In a thread, also the conversion of the chat: one with as many messages as a body can hold takes a second.
    encode = partial(_chat, call, target)
    tokens, images = await call.gateway.tenants.pools.text.in_thread(call.tenant_id, encode)
    return target, await with_images(target, tokens, images)


def _chat(call: Call[RequestT], target: Target) -> tuple[list[int], SentImages]:
    wanted = call.body
    images = files_of(call, target, wanted.image_uris)
    return target.codec.encode_chat(wanted.chat(), wanted.offered_tools), images
