"""Routes for futures: clients poll them for results, and each poll waits for a while until the result is there."""

from collections.abc import AsyncGenerator, Iterator
from functools import partial

from fastapi import Request, Response

from twinkle.errors import InvalidInputError
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.owners import by_request_id, by_sampling_session
from twinkle.server.http.requests import JSON_BYTES, PREFIX, json_response
from twinkle.server.http.routes import Call, Routes, json_body
from twinkle.server.http.streams import Delivering, StreamedResult, sent_result, undelivered
from twinkle.server.ids import RequestId
from twinkle.server.services.sampling.completions import Completion
from twinkle.server.types import Encoding, Outcome
from twinkle.server.wire import responses
from twinkle.server.wire.errors import JsonTooLargeError
from twinkle.server.wire.json_results import estimated_json_bytes, json_pieces
from twinkle.server.wire.sampling import CancelFutureRequest, RetrieveFutureRequest, RetrieveFuturesRequest

routes = Routes(PREFIX)

# Bytes. A client that supports it first gets only the size of a larger result, and fetches it when it has room.
_LARGE_RESULT = 2**20
_SMALL_RESULT = 2**15  # bytes of JSON that are written on the event loop, in about a millisecond


@routes.post("/retrieve_future", by_request_id, json_body(RetrieveFutureRequest), ends_with_client=True, soon=True)
async def retrieve_future(call: Call[RetrieveFutureRequest]) -> Response:
    gateway, tenant_id, wanted = call.gateway, call.tenant_id, call.body
    with gateway.tenants.polling(tenant_id):
        request = RequestId.parse(wanted.request_id)
        outcome, delivering = await _fetched(gateway, request, tenant_id)
    if outcome is None:
        pending = responses.pending(wanted.request_id, await _why_queued(gateway, request, tenant_id))
        return Response(pending, 408, media_type="application/json")
    as_it_is = outcome.encoding is Encoding.JSON or _reads_protobuf(call.request)
    size = len(outcome.body) if as_it_is else estimated_json_bytes(outcome)
    if wanted.allow_metadata_only and size > _LARGE_RESULT:
        return json_response({"status": "complete_metadata", "response_payload_size": size})
    if as_it_is:
        return sent_result(outcome.body, outcome.encoding.value, delivering)
    limit = gateway.config.limits.max_json_result_bytes
    if size > limit:
        raise JsonTooLargeError(size, limit)
    pieces = json_pieces(outcome, sample=request.is_sample)
    if size < _SMALL_RESULT:
        return sent_result(b"".join(pieces), Encoding.JSON.value, delivering)
    return StreamedResult(_written(gateway, tenant_id, pieces), Encoding.JSON.value, delivering)


async def _written(gateway: Gateway, tenant_id: str, pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a result. Each takes milliseconds in a thread of the pool, which other tenants share."""
    while (piece := await gateway.reading.in_thread(tenant_id, partial(next, pieces, None))) is not None:
        yield piece


@routes.post(
    "/retrieve_futures",
    by_sampling_session,
    json_body(RetrieveFuturesRequest, 4 * JSON_BYTES),  # it lists all results that were fetched since the last poll
    ends_with_client=True,
    soon=True,
)
async def retrieve_futures(call: Call[RetrieveFuturesRequest]) -> Response:
    """Return all new completions of one client's samples, in one long poll."""
    gateway, wanted, target = call.gateway, call.body, call.body.target
    session = await gateway.sampling_session(target.sampling_session_id, call.tenant_id)
    longest = gateway.config.clients.long_poll_seconds
    timeout = longest if wanted.timeout is None else min(wanted.timeout, longest)
    with gateway.tenants.polling(call.tenant_id):
        done = await gateway.completions(
            session, target.cloned_sampler_id, wanted.prev_cursor, wanted.retrieved_request_ids, timeout
        )
    cursor = done[-1].place if done else wanted.prev_cursor
    return json_response({"completions": [_completion(one) for one in done], "cursor": cursor})


@routes.post("/cancel_future", by_request_id, json_body(CancelFutureRequest))
async def cancel_future(call: Call[CancelFutureRequest]) -> Response:
    """Cancel a sample that its client no longer needs. If it is done, or its number was never used, nothing happens."""
    gateway, tenant_id, request_id = call.gateway, call.tenant_id, call.body.request_id
    request = RequestId.parse(request_id)
    if not request.is_sample:
        await gateway.run_record(request.owner, tenant_id)
        raise InvalidInputError("request_id", request_id, "the id of a sample: ops on a model cannot be cancelled")
    session = await gateway.sampling_session(request.owner, tenant_id)
    gateway.sampler_of(session).cancel(request_id)
    return json_response({})


def _reads_protobuf(request: Request) -> bool:
    """Return whether the client asks for a result in protobuf, as it is stored: its Accept header must name protobuf.

    SDKs from 0.20 on do so, alone or before ``application/json``. Everybody else gets JSON, whatever the header says:
    curl and browsers send ``*/*``. If both are named, the one with the higher ``q`` counts, and protobuf if they are
    equal.
    """
    wanted = _qualities(request.headers.get("accept", ""))
    protobuf = wanted.get(Encoding.PROTOBUF.value, 0.0)
    return protobuf > 0 and protobuf >= wanted.get(Encoding.JSON.value, 0.0)


def _qualities(accept: str) -> dict[str, float]:
    """Return the media types that an Accept header names, in lower case, each with its ``q``."""
    named = {}
    for part in accept.split(","):
        media_type, *parameters = (each.strip().lower() for each in part.split(";"))
        q = next((each.removeprefix("q=") for each in parameters if each.startswith("q=")), "1")
        try:
            named[media_type] = float(q)
        except ValueError:
            named[media_type] = 1.0  # not a number: the type is named nevertheless
    return named


def _completion(done: Completion) -> dict[str, object]:
    if done.size is None:
        return {"state": "failed", "request_id": done.request_id}
    return {"state": "finished", "request_id": done.request_id, "response_payload_uncompressed_size": done.size}


async def _why_queued(gateway: Gateway, request: RequestId, tenant_id: str) -> str | None:
    """Return why a sample has not begun; None for a sample that has, and for other requests."""
    if not request.is_sample:
        return None
    session = await gateway.sampling_session(request.owner, tenant_id)
    return gateway.sampler_of(session).why_queued(str(request))


async def _fetched(gateway: Gateway, request: RequestId, tenant_id: str) -> tuple[Outcome | None, Delivering]:
    """Return the outcome, or None while there is none, and the context in which its delivery is noted.

    Ids of other tenants raise the same errors as unknown ids.
    """
    request_id = str(request)
    seconds = gateway.config.clients.long_poll_seconds
    delivering = undelivered()  # for outcomes that take no memory worth freeing after delivery
    if request.is_sample:
        session = await gateway.sampling_session(request.owner, tenant_id)
        sampler = gateway.sampler_of(session)
        outcome = await sampler.wait(request, seconds)
        delivering = sampler.delivering(request_id)
    elif request.is_custom_loss:
        outcome = await gateway.custom_losses.outcome(request_id, tenant_id)
    else:
        run = await gateway.run_record(request.owner, tenant_id)
        if request.is_unload:
            outcome = await gateway.unloading.outcome(run, seconds)
        else:
            training = gateway.serving(run.model_name).training
            outcome = await training.wait(request, run, seconds)
            delivering = training.delivering(request_id)
    return outcome, delivering
