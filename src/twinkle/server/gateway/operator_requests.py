"""Requests that operators make of a running server on its command line. Maintenance executes and answers them."""

import logging
from collections.abc import Callable

from twinkle.errors import NotFoundError, TwinkleError, TwinkleServerError, UnknownNameError
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.state.records.coordination import EVICT, OperatorRequest

logger = logging.getLogger(__name__)

_FORGOTTEN_SECONDS = 86_400.0


async def answer_operators(
    gateway: Gateway, now: float, is_ours: Callable[[OperatorRequest], bool] = lambda _request: True
) -> None:
    """Execute the unanswered requests that are for this process, in order; delete requests older than a day.

    A request that fails is answered with its error message, or with "internal error" if the failure was unexpected.
    ``is_ours``: returns whether a request is for this process, where the server has several.
    """
    requests = gateway.store.operator_requests
    for request in await requests.open():
        if not is_ours(request):
            continue
        logger.info("operator request: %s %s", request.kind, request.target)
        try:
            if request.kind != EVICT:
                raise UnknownNameError("request", request.kind, [EVICT])
            answer, failed = await _evict(gateway, request.target), False
        except TwinkleError as error:
            answer, failed = str(error), True
        except Exception:  # maintenance must survive any error; without an answer this one would be tried for ever
            logger.exception("%s %s failed", request.kind, request.target)
            answer, failed = "internal error; the server's log has the details", True
        await requests.answer(request.request_id, answer, failed=failed)
    await requests.forget(now - _FORGOTTEN_SECONDS)


async def _evict(gateway: Gateway, run_id: str) -> str:
    """Evict an adapter and return the note that later errors show to its tenant."""
    run = await gateway.store.runs.get(run_id)
    if run is None or run.state != "live" or run.model_name not in gateway.services:
        raise NotFoundError("model that is live here", run_id)
    await gateway.evict(run, f"model {run_id} was evicted by the operator")
    evicted = await gateway.store.runs.get(run_id)
    if evicted is None or evicted.state != "parked" or evicted.note is None:
        raise TwinkleServerError(f"{run_id} could not be saved as a checkpoint; the server's log says why")
    return evicted.note
