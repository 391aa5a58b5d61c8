"""A sampling request until it is done, and how its failure is told."""

import asyncio
import logging
from dataclasses import dataclass

from twinkle.errors import ShuttingDownError, TwinkleError, TwinkleServerError, UserError
from twinkle.sampler.types import Progress, SampleRequest, SampleResult
from twinkle.server.completions import SEQ_IDS_PER_CLIENT
from twinkle.server.execution import failure_of, unexpected
from twinkle.server.ids import split_request_id
from twinkle.server.telemetry.recording import Outcomes
from twinkle.server.types import Outcome, SamplingSessionRecord
from twinkle.server.wire.sampling import Encode

logger = logging.getLogger(__name__)

Event = Progress | SampleResult | TwinkleError


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request until it is done. It ends in a future, encoded, or in a queue of events, as it is."""

    request: SampleRequest
    session: SamplingSessionRecord
    into: Encode | asyncio.Queue[Event]

    @property
    def request_id(self) -> str:
        return self.request.request_id


def client_of(job: SampleJob) -> tuple[str, int, int] | None:
    """(sampling session, client, sequence number); None for a request that has no number."""
    parts = split_request_id(job.request_id)
    return None if parts is None else (parts[0], parts[1] // SEQ_IDS_PER_CLIENT, parts[1])


def failed(job: SampleJob, error: Exception) -> TwinkleError | Outcome:
    """As the request is to hear of it. What is ours is logged."""
    streamed = isinstance(job.into, asyncio.Queue)
    if isinstance(error, TwinkleError):
        return error if streamed else failure_of(error, job.request_id)
    if not streamed:
        return unexpected(error, job.request_id)
    logger.error("request %s failed", job.request_id, exc_info=error, extra={"request_id": job.request_id})
    return TwinkleServerError(f"internal error; the server's log has the details under request {job.request_id}")


def label_of(event: SampleResult | TwinkleError | Outcome) -> str:
    """How a request ended, for the metrics."""
    if isinstance(event, Outcome):
        return Outcomes.of(event)
    if isinstance(event, SampleResult):
        return Outcomes.SUCCEEDED
    if isinstance(event, ShuttingDownError):
        return Outcomes.CANCELLED
    return Outcomes.USER_ERROR if isinstance(event, UserError) else Outcomes.SERVER_ERROR
