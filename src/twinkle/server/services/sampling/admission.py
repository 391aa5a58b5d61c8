"""Which samples are taken in, and how many of them the engine has: no more than each tenant may, however many come."""

from collections import Counter
from dataclasses import replace

from twinkle.errors import QuotaError
from twinkle.server.services.futures import Futures
from twinkle.server.services.sampling.jobs import Happening, SampleJob
from twinkle.server.tenancy.tenants import Tenants

__all__ = ["SampleAdmission"]


class SampleAdmission:
    """Counts what is under way by tenant. Nothing here waits: between check and count nobody else gets in."""

    def __init__(self, tenants: Tenants, futures: Futures, engine_samples: int) -> None:
        self._tenants = tenants
        self._futures = futures
        self._engine_samples = engine_samples
        self._under_way: Counter[str] = Counter()  # requests that are not done
        self._in_engine: Counter[str] = Counter()  # samples that the engine was given
        self._coming: Counter[str] = Counter()  # bytes of their results, at most

    def check(self, tenant_id: str) -> None:
        """Raise QuotaError if no sample of this tenant would be taken now, however small."""
        limits = self._tenants.limits(tenant_id)
        under_way = self._under_way[tenant_id]
        if under_way >= limits.waiting_samples:
            raise QuotaError("waiting samples", under_way, limits.waiting_samples, "max_waiting_samples_per_tenant")
        self._futures.memory.check(tenant_id)
        unfetched = self._futures.unfetched_bytes(tenant_id)
        if unfetched >= limits.unfetched_bytes:
            raise QuotaError(
                "bytes of results not fetched", unfetched, limits.unfetched_bytes, "max_unfetched_result_bytes"
            )
        self._tenants.sampling_rate.check(tenant_id, limits.sampling_tokens_per_minute)

    def enter(self, job: SampleJob) -> SampleJob:
        """With what it may cost at most held back, but no more than all there is: hardly any takes that much."""
        self.check(job.tenant_id)
        limit = self._tenants.limits(job.tenant_id).sampling_tokens_per_minute
        if limit is not None:
            job = replace(job, charged=min(job.cost, limit))
            self._tenants.sampling_rate.charge(job.tenant_id, job.charged, limit)
        self._under_way[job.tenant_id] += 1
        return job

    def leave(self, job: SampleJob) -> None:
        self._under_way[job.tenant_id] -= 1
        for counts in (self._under_way, self._in_engine, self._coming):
            if not counts[job.tenant_id]:
                del counts[job.tenant_id]

    def give_back(self, job: SampleJob, used: int) -> None:
        """Of what was held back, all but what it used."""
        if job.charged:
            limit = self._tenants.limits(job.tenant_id).sampling_tokens_per_minute
            self._tenants.sampling_rate.give_back(job.tenant_id, job.charged - used, limit)

    def count(self, happening: Happening) -> None:
        """What a request cost that has ended. One that failed costs its prompt, and is not in the tenant's usage."""
        job, sampled = happening.job, happening.sampled_tokens
        prompt = len(job.request.prompt)
        self.give_back(job, prompt + sampled + job.extra_cost)
        if not happening.failed:
            self._tenants.usage.add(job.tenant_id, sampled_tokens=sampled, prompt_tokens=prompt, requests=1)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def may_start(self, tenant_id: str) -> bool:
        """Return whether the engine is given one more request of this tenant.

        Not while the tenant leaves too many results unfetched, those on their way included: what waits here could not
        be refused any more. Of the engine a tenant gets three quarters at most. A tenant that has nothing in the engine
        is let in even when it is full, unless many tenants are there: the engine shares its places among them, and only
        what it was given can get one.
        """
        own, quarter = self._in_engine[tenant_id], self._engine_samples // 4
        full = self._in_engine.total() >= self._engine_samples
        if own >= self._engine_samples - quarter or (full and (own > 0 or len(self._in_engine) >= quarter)):
            return False
        unfetched, coming = self._futures.unfetched_bytes(tenant_id), self._coming[tenant_id]
        return unfetched + coming < self._tenants.limits(tenant_id).unfetched_bytes

    def start(self, job: SampleJob) -> None:
        self._in_engine[job.tenant_id] += job.request.num_samples
        self._coming[job.tenant_id] += job.price.result_bytes

    def stop(self, job: SampleJob) -> None:
        """The engine is done with it."""
        self._in_engine[job.tenant_id] -= job.request.num_samples
        self._coming[job.tenant_id] -= job.price.result_bytes
