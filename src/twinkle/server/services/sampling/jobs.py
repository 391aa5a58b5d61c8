"""A request to sample on its way through the sampler service."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.errors import TwinkleError, TwinkleServerError
from twinkle.sampler.types import Progress, SampleRequest, SampleResult
from twinkle.server.ids import split_request_id
from twinkle.server.services.sampling.completions import SEQ_IDS_PER_CLIENT
from twinkle.server.services.training.execution import failure_of, unexpected
from twinkle.server.types import OBJECT_BYTES, TARGETS_A_TOKEN, Outcome, Price, SamplingSessionRecord
from twinkle.server.wire.sampling import Encode

__all__ = ["Event", "Happening", "Orders", "SampleJob", "price_of"]

logger = logging.getLogger(__name__)

Event = Progress | SampleResult | TwinkleError


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request until it is done. It ends in a future, encoded, or in a queue of events, as it is."""

    request: SampleRequest
    session: SamplingSessionRecord
    into: Encode | asyncio.Queue[Event]
    price: Price  # of all that it may take at most
    charged: int = 0  # of them, those that count against its tenant's minute until it has ended

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def cost(self) -> int:
        """What it counts in shares and against a minute's tokens."""
        return max(self.price.tokens, self.price.work)

    @property
    def extra_cost(self) -> int:
        """What it takes beside its tokens, however few of them are sampled in the end."""
        return self.cost - self.price.tokens

    @property
    def tenant_id(self) -> str:
        return self.session.tenant_id

    @property
    def client(self) -> tuple[str, int, int] | None:
        """(sampling session, client, sequence number); None for a request that has no number."""
        parts = split_request_id(self.request_id)
        return None if parts is None else (parts[0], parts[1] // SEQ_IDS_PER_CLIENT, parts[1])

    def failed(self, error: Exception) -> TwinkleError | Outcome:
        """As the request is to hear of it. What is ours is logged."""
        streamed = isinstance(self.into, asyncio.Queue)
        if isinstance(error, TwinkleError):
            return error if streamed else failure_of(error, self.request_id)
        if not streamed:
            return unexpected(error, self.request_id)
        logger.error("request %s failed", self.request_id, exc_info=error, extra={"request_id": self.request_id})
        return TwinkleServerError(f"internal error; the server's log has the details under request {self.request_id}")


@dataclass(frozen=True)
class Orders:
    """What a turn has to do before it samples."""

    cancelled: Sequence[str]
    given_up: Sequence[str]  # versions
    fresh: Sequence[SampleJob]


@dataclass(frozen=True)
class Happening:
    """What came of a job in a turn. ``sampled_tokens``: of one that ended well."""

    job: SampleJob
    event: Event | Outcome
    sampled_tokens: int = 0

    @property
    def failed(self) -> bool:
        return isinstance(self.event, TwinkleError) or (isinstance(self.event, Outcome) and self.event.failed)


def price_of(request: SampleRequest, context: int) -> Price:
    """The prompt and all that may be sampled after it; and what is asked for of each token beside it."""
    prompt = len(request.prompt)
    longest = request.params.max_tokens
    sampled = request.num_samples * (max(context - prompt, 0) if longest is None else longest)
    scored = prompt if request.prompt_logprobs_last_n is None else request.prompt_logprobs_last_n
    targets = 0 if request.target_prompt_logprobs is None else request.target_prompt_logprobs.size
    cells = prompt * (request.topk_prompt_logprobs + request.prompt_alt_tokens) + targets
    fits = min(sampled, request.num_samples * max(context - prompt, 0))  # of what is asked for, so much can be
    drawn = fits * request.topk_sample_logprobs
    return Price(
        tokens=prompt + sampled,
        work=prompt + sampled + (cells + drawn) // TARGETS_A_TOKEN,
        held_bytes=OBJECT_BYTES + request.prompt.nbytes + 8 * targets,
        result_bytes=8 * fits + 12 * (cells + drawn) + 4 * (scored if request.prompt_logprobs else 0),
    )
