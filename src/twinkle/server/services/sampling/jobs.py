"""Sampling requests inside the sampler service, and the limits on how many each tenant may have there."""

import asyncio
from dataclasses import dataclass, replace
from functools import cached_property

from twinkle.errors import QuotaError, TwinkleError, TwinkleServerError
from twinkle.sampler.types import Progress, SampleRequest, SampleResult
from twinkle.server.ids import RequestId
from twinkle.server.services.futures import Futures
from twinkle.server.services.training.execution import failure_of, unexpected
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import (
    OBJECT_BYTES,
    PIXELS_A_TOKEN,
    ROUTE_BYTES,
    TARGETS_A_TOKEN,
    Outcome,
    Price,
    SamplingSessionRecord,
    Tally,
    image_bytes,
)
from twinkle.server.usage import UsageCounts
from twinkle.server.wire.sampling import Encode, as_sent

Event = Progress | SampleResult | TwinkleError
EventQueue = asyncio.Queue[tuple[str, Event]]  # each event with its request id


@dataclass(frozen=True, eq=False)
class SampleJob:
    """One sampling request from its acceptance to its end.

    ``into`` decides where the result goes: encoded by this function into a future, or unencoded into this queue.
    """

    request: SampleRequest
    session: SamplingSessionRecord
    into: Encode | EventQueue
    price: Price  # the most that the request may cost
    charged: int = 0  # tokens taken from the tenant's rate limit when it was accepted; corrected when it ends

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
        """Return whether the HTTP request that brought this job is open and reads its events from a queue."""
        return isinstance(self.into, asyncio.Queue)

    def send(self, event: Event) -> None:
        """Put an event into the job's queue; without effect for a job whose result goes to a future."""
        if isinstance(self.into, asyncio.Queue):
            self.into.put_nowait((self.request_id, event))

    def failed(self, error: Exception) -> TwinkleError | Outcome:
        """Return the error as the client gets it: an outcome for a future, an exception for a queue.

        An error that is not a TwinkleError is logged, and its text is not shown. For a future, a TwinkleError that is
        not the user's mistake is logged, too.
        """
        if not self.streamed:
            return failure_of(as_sent(error), self.request_id)
        if isinstance(error, TwinkleError):
            return error
        return TwinkleServerError(unexpected(error, self.request_id).message)


@dataclass(frozen=True)
class SampleEvent:
    """Something that happened to a job in a turn of the compute thread: progress, its result or its error.

    ``sampled_tokens`` is set for a job that succeeded.
    """

    job: SampleJob
    result: Event | Outcome
    sampled_tokens: int = 0

    @property
    def failed(self) -> bool:
        return isinstance(self.result, TwinkleError) or (isinstance(self.result, Outcome) and self.result.failed)


def price_of(request: SampleRequest, context: int, pixels: int = 0) -> Price:
    """Return the highest possible price: the prompt, all tokens that may be sampled, and the log-probabilities.

    ``context``: the most tokens of prompt and sample together; it bounds a sample that has no ``max_tokens``.
    ``pixels``: how many the files of its images have.
    """
    prompt = len(request.prompt)
    longest = request.params.max_tokens
    sampled = request.num_samples * (max(context - prompt, 0) if longest is None else longest)
    scored = prompt if request.prompt_logprobs_last_n is None else request.prompt_logprobs_last_n
    targets = 0 if request.target_prompt_logprobs is None else request.target_prompt_logprobs.size
    cells = prompt * (request.topk_prompt_logprobs + request.prompt_alt_tokens) + targets
    fits = min(sampled, request.num_samples * max(context - prompt, 0))  # the sampled tokens that fit into the context
    drawn = fits * request.topk_sample_logprobs
    routes = ROUTE_BYTES * (request.num_samples * prompt + fits) if request.routed_experts else 0
    return Price(
        tokens=prompt + sampled,
        work=prompt + sampled + (cells + drawn) // TARGETS_A_TOKEN + pixels // PIXELS_A_TOKEN,
        held_bytes=OBJECT_BYTES + request.prompt.nbytes + 8 * targets + image_bytes(request.images),
        result_bytes=8 * fits + 12 * (cells + drawn) + 4 * (scored if request.prompt_logprobs else 0) + routes,
    )


class SampleAdmission:
    """Checks tenants' limits: which samples are accepted, and how many of them the engine gets at a time.

    Belongs to one event loop. No method awaits, so that no other request gets in between a check and its count.
    """

    def __init__(self, tenants: Tenants, futures: Futures, engine_samples: int) -> None:
        self._tenants = tenants
        self._futures = futures
        self._engine_samples = engine_samples
        # All by tenant:
        self._under_way = Tally()  # accepted requests that have not ended
        self._in_engine = Tally()  # samples in the engine
        self._coming = Tally()  # the most bytes that their results may have
        self._held = Tally()  # bytes of accepted requests that have not ended

    def check(self, tenant_id: str) -> None:
        """Raise an error if no request of this tenant would be accepted now, however small it is.

        QuotaError or RateLimitError: the tenant's own limits. OverloadedError: the results of all tenants.
        """
        limits = self._tenants.limits(tenant_id)
        under_way = self._under_way[tenant_id]
        most = limits.max_waiting_samples_per_tenant
        if under_way >= most:
            raise QuotaError("waiting samples", under_way, most, "max_waiting_samples_per_tenant")
        self._futures.check_unfetched(tenant_id, limits.max_unfetched_result_bytes)
        self._tenants.sampling_rate.check(tenant_id, limits.max_sampling_tokens_per_minute)

    def enter(self, job: SampleJob) -> SampleJob:
        """Accept a job, or raise an error like :meth:`check`. If the tenant has a limit on tokens per minute, charge
        the job's highest possible cost, but at most one minute's tokens. Return the job with what it was charged.
        """
        self.check(job.tenant_id)
        held, most = self._held[job.tenant_id], self._tenants.limits(job.tenant_id).max_queued_bytes_per_tenant
        if held and held + job.price.held_bytes > most:
            raise QuotaError("bytes of waiting samples", held, most, "max_queued_bytes_per_tenant")
        limit = self._tenants.limits(job.tenant_id).max_sampling_tokens_per_minute
        if limit is not None:
            job = replace(job, charged=min(job.price.cost, limit))
            self._tenants.sampling_rate.charge(job.tenant_id, job.charged, limit)
        self._under_way[job.tenant_id] += 1
        self._held[job.tenant_id] += job.price.held_bytes
        return job

    def leave(self, job: SampleJob) -> None:
        """Note that a job has ended."""
        self._under_way[job.tenant_id] -= 1
        self._held[job.tenant_id] -= job.price.held_bytes

    def give_back(self, job: SampleJob, used: int) -> None:
        """Refund what the job was charged beyond the ``used`` tokens; charge the rest if it used more."""
        if job.charged:
            limit = self._tenants.limits(job.tenant_id).max_sampling_tokens_per_minute
            self._tenants.sampling_rate.give_back(job.tenant_id, job.charged - used, limit)

    def count(self, event: SampleEvent) -> None:
        """Correct the charge of a request that has ended, and add it to the tenant's usage.

        A failed request is charged for its prompt and its tables of log-probabilities, and is not added to the usage.
        """
        job, sampled = event.job, event.sampled_tokens
        prompt = len(job.request.prompt)
        # The part of the cost that is not tokens, such as top-k tables, is charged however few tokens were sampled.
        self.give_back(job, prompt + sampled + job.price.cost - job.price.tokens)
        if not event.failed:
            used = UsageCounts(sampled_tokens=sampled, prompt_tokens=prompt, requests=1)
            self._tenants.usage.add(job.tenant_id, used)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def may_start(self, tenant_id: str) -> bool:
        """Return whether the engine may be given one more request of this tenant.

        It may not while the tenant's unfetched results, including those that the engine computes for it now, reach
        their limit: the requests that wait here were accepted and can no longer be refused. It may not, either, once
        its samples in the engine reach three quarters of ``engine_samples``. A tenant that has nothing in the engine
        may start a request even when the engine is full, unless many tenants are in it (a quarter of
        ``engine_samples``): the engine divides its places among the tenants that it knows.
        """
        own, quarter = self._in_engine[tenant_id], self._engine_samples // 4
        full = self._in_engine.total() >= self._engine_samples
        if own >= self._engine_samples - quarter or (full and (own > 0 or len(self._in_engine) >= quarter)):
            return False
        unfetched, coming = self._futures.unfetched_bytes(tenant_id), self._coming[tenant_id]
        return unfetched + coming < self._tenants.limits(tenant_id).max_unfetched_result_bytes

    def start(self, job: SampleJob) -> None:
        """Note that the engine is given the job."""
        self._in_engine[job.tenant_id] += job.request.num_samples
        self._coming[job.tenant_id] += job.price.result_bytes

    def stop(self, job: SampleJob) -> None:
        """Note that the engine is done with the job."""
        self._in_engine[job.tenant_id] -= job.request.num_samples
        self._coming[job.tenant_id] -= job.price.result_bytes
