"""Sampling requests on their way through the sampler service, and how many of them each tenant may have there."""

import asyncio
from dataclasses import dataclass, replace
from functools import cached_property

from twinkle.errors import QuotaError, TwinkleError, TwinkleServerError
from twinkle.sampler.types import Progress, SampleRequest, SampleResult
from twinkle.server.ids import RequestId
from twinkle.server.services.futures import Futures
from twinkle.server.services.training.execution import failure_of, unexpected
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import OBJECT_BYTES, TARGETS_A_TOKEN, Outcome, Price, SamplingSessionRecord, Tally
from twinkle.server.usage import UsageCounts
from twinkle.server.wire.sampling import Encode

Event = Progress | SampleResult | TwinkleError
EventQueue = asyncio.Queue[tuple[str, Event]]  # with the id of the request


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request until it is done. Its result goes to a future, encoded, or to a queue of events, as it is."""

    request: SampleRequest
    session: SamplingSessionRecord
    into: Encode | EventQueue
    price: Price  # of all that it may take at most
    charged: int = 0  # of them, those that count against its tenant's minute until it has ended

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def tenant_id(self) -> str:
        return self.session.tenant_id

    @cached_property
    def numbered(self) -> RequestId | None:
        """Return the request's id; None for a request that has no number in a sampling session."""
        return RequestId.parse_or_none(self.request_id)

    @property
    def streamed(self) -> bool:
        """Return whether events are read from a queue, in the connection that the request came with."""
        return isinstance(self.into, asyncio.Queue)

    def send(self, event: Event) -> None:
        """Hand an event to the reader of the queue; a request that ends in a future has none."""
        if isinstance(self.into, asyncio.Queue):
            self.into.put_nowait((self.request_id, event))

    def failed(self, error: Exception) -> TwinkleError | Outcome:
        """Return the error as the client gets it. An error of the server is logged."""
        if not self.streamed:
            return failure_of(error, self.request_id)
        if isinstance(error, TwinkleError):
            return error
        return TwinkleServerError(unexpected(error, self.request_id).message)


@dataclass(frozen=True)
class SampleEvent:
    """What a turn has brought a job. ``sampled_tokens``: of a job that succeeded."""

    job: SampleJob
    result: Event | Outcome
    sampled_tokens: int = 0

    @property
    def failed(self) -> bool:
        return isinstance(self.result, TwinkleError) or (isinstance(self.result, Outcome) and self.result.failed)


def price_of(request: SampleRequest, context: int) -> Price:
    """Return the price of the prompt, of all that may be sampled after it, and of the log-probabilities asked for."""
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


class SampleAdmission:
    """Decides which samples are accepted and how many the engine has: no more than each tenant may.

    Nothing here awaits: between check and count no other request gets in.
    """

    def __init__(self, tenants: Tenants, futures: Futures, engine_samples: int) -> None:
        self._tenants = tenants
        self._futures = futures
        self._engine_samples = engine_samples
        self._under_way = Tally()  # requests that are not done
        self._in_engine = Tally()  # samples that the engine was given
        self._coming = Tally()  # bytes of their results, at most

    def check(self, tenant_id: str) -> None:
        """Raise QuotaError if no sample of this tenant would be taken now, however small."""
        limits = self._tenants.limits(tenant_id)
        under_way = self._under_way[tenant_id]
        most = limits.max_waiting_samples_per_tenant
        if under_way >= most:
            raise QuotaError("waiting samples", under_way, most, "max_waiting_samples_per_tenant")
        self._futures.check_unfetched(tenant_id, limits.max_unfetched_result_bytes)
        self._tenants.sampling_rate.check(tenant_id, limits.max_sampling_tokens_per_minute)

    def enter(self, job: SampleJob) -> SampleJob:
        """Accept a job and charge the most that it may cost, but no more than a minute's tokens."""
        self.check(job.tenant_id)
        limit = self._tenants.limits(job.tenant_id).max_sampling_tokens_per_minute
        if limit is not None:
            job = replace(job, charged=min(job.price.cost, limit))
            self._tenants.sampling_rate.charge(job.tenant_id, job.charged, limit)
        self._under_way[job.tenant_id] += 1
        return job

    def leave(self, job: SampleJob) -> None:
        self._under_way[job.tenant_id] -= 1

    def give_back(self, job: SampleJob, used: int) -> None:
        """Refund all that was charged but what the job used."""
        if job.charged:
            limit = self._tenants.limits(job.tenant_id).max_sampling_tokens_per_minute
            self._tenants.sampling_rate.give_back(job.tenant_id, job.charged - used, limit)

    def count(self, event: SampleEvent) -> None:
        """Charge a request that has ended. One that failed costs its prompt, and is not in the tenant's usage."""
        job, sampled = event.job, event.sampled_tokens
        prompt = len(job.request.prompt)
        # What it costs beside its tokens is charged however few of them were sampled in the end.
        self.give_back(job, prompt + sampled + job.price.cost - job.price.tokens)
        if not event.failed:
            used = UsageCounts(sampled_tokens=sampled, prompt_tokens=prompt, requests=1)
            self._tenants.usage.add(job.tenant_id, used)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def may_start(self, tenant_id: str) -> bool:
        """Return whether the engine is given one more request of this tenant.

        Not while the tenant leaves too many results unfetched, those on their way included: what waits here could not
        be refused any more. A tenant gets three quarters of the engine at most. A tenant that has nothing in the engine
        is let in even when it is full, unless many tenants are there: the engine shares its places among them, and only
        what it was given can get one.
        """
        own, quarter = self._in_engine[tenant_id], self._engine_samples // 4
        full = self._in_engine.total() >= self._engine_samples
        if own >= self._engine_samples - quarter or (full and (own > 0 or len(self._in_engine) >= quarter)):
            return False
        unfetched, coming = self._futures.unfetched_bytes(tenant_id), self._coming[tenant_id]
        return unfetched + coming < self._tenants.limits(tenant_id).max_unfetched_result_bytes

    def start(self, job: SampleJob) -> None:
        self._in_engine[job.tenant_id] += job.request.num_samples
        self._coming[job.tenant_id] += job.price.result_bytes

    def stop(self, job: SampleJob) -> None:
        """Note that the engine is done with the job."""
        self._in_engine[job.tenant_id] -= job.request.num_samples
        self._coming[job.tenant_id] -= job.price.result_bytes
