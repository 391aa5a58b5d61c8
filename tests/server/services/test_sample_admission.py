"""Samples are admitted and sent to the engine up to a tenant's limits, and other tenants are not delayed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.server.services.test_sampler_service import ScriptedSampler, generated, request, running, session, turns
from twinkle.errors import QuotaError, RateLimitError
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.ids import RequestId
from twinkle.server.scheduling.shares import Priority, TenantShare
from twinkle.server.services.futures import PROMISE_BYTES
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.tenancy.tenants import Tenants, TenantTerms


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limited(clock: Clock | None = None, **limits: int) -> Tenants:
    return Tenants(TenantTerms(LimitsConfig(**limits)), clock=clock or Clock())


def taken(service: SamplerService, count: int, tenant: str = "t", first: int = 0, **fields: object) -> int:
    """Submit this many samples at once; return how many were admitted."""
    let_in = 0
    for number in range(first, first + count):
        try:
            service.sample(session(tenant), request(number, **fields))
            let_in += 1
        except QuotaError:
            continue
    return let_in


def test_waiting_samples_are_as_many_as_they_may_be() -> None:
    async def check(service: SamplerService) -> None:
        async def one(number: int) -> bool:
            try:
                await asyncio.wait_for(anext(generated(service, session(), request(number))), 0.5)
            except QuotaError:
                return False
            except TimeoutError:
                return True
            raise AssertionError("nothing ever ends here")

        assert sum(await asyncio.gather(*(one(number) for number in range(30)))) == 6
        assert taken(service, 10, first=100) == 6  # the earlier ones were cancelled

    running(ScriptedSampler(), check, tenants=limited(max_waiting_samples_per_tenant=6))


def test_waiting_samples_hold_limited_memory() -> None:
    """The next sample fits as soon as an earlier one has ended. A sample alone always fits."""

    async def check(service: SamplerService) -> None:
        service.sample(session(), replace(request(0), prompt=np.zeros(100_000, np.int64)))
        assert taken(service, 1, first=1) == 0
        service.cancel(request(0).request_id)
        assert taken(service, 20, first=2) == 9

    running(ScriptedSampler(), check, tenants=limited(max_queued_bytes_per_tenant=10_000))


def test_a_quarter_of_the_engine_is_left_for_others() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        taken(service, 100, "crowd")
        await turns(service)
        assert len(sampler.submitted) == 6
        service.sample(session("quiet"), request(1000))  # admitted, however long the others take
        await turns(service)
        assert sampler.submitted[6:] == ["s:sample:0:1000"]

    running(sampler, check, engine_samples=8)


def test_a_full_engine_takes_the_first_request_of_others() -> None:
    """A request counts with all its samples, so one request may exceed its tenant's share of the engine."""
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        taken(service, 3, "crowd", num_samples=5)
        await turns(service)
        assert len(sampler.submitted) == 2, "ten samples where eight are allowed"
        taken(service, 3, "quiet", first=1000)
        await turns(service)
        assert sampler.submitted[2:] == ["s:sample:0:1000"]

    running(sampler, check, engine_samples=8)


def test_who_fetches_nothing_gets_nothing_more_computed() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        sampler.finish |= {f"s:sample:0:{number}" for number in range(200)}
        taken(service, 40)
        service.sample(session("other"), request(100))
        await turns(service, 40)
        first = [each for each in sampler.submitted if each != "s:sample:0:100"]
        assert "s:sample:0:100" in sampler.submitted
        # Only samples that were in the engine when the last one fitted may exceed the limit.
        assert 5 <= len(first) <= 5 + 3
        with pytest.raises(QuotaError, match="bytes of results not fetched"):
            service.sample(session(), request(150))
        for request_id in first:
            assert await service.wait(RequestId.parse(request_id), 5) is not None
            with service.delivering(request_id) as delivery:
                delivery.complete = True
        await turns(service, 10)
        assert len(sampler.submitted) > len(first) + 1

    running(sampler, check, tenants=limited(max_unfetched_result_bytes=5 * PROMISE_BYTES), engine_samples=4)


def test_tokens_are_held_back_until_it_is_known_how_many_were_used() -> None:
    clock, sampler = Clock(), ScriptedSampler()

    async def check(service: SamplerService) -> None:
        assert taken(service, 10) == 2  # each takes up to 3 + 40 of 100 tokens
        with pytest.raises(RateLimitError, match="sampling tokens per minute: the limit of 100"):
            service.sample(session(), request(20))
        sampler.finish.add("s:sample:0:0")
        await turns(service)
        await service.wait(RequestId("s:sample:0", 0), 60)
        assert taken(service, 10, first=30) == 1  # only five of 43 were used, so 52 are left
        service.cancel("s:sample:0:1")  # it was in the engine, so its use is unknown
        assert taken(service, 10, first=50) == 0
        clock.now += 60
        assert taken(service, 10, first=70) == 2

    running(sampler, check, tenants=limited(clock, max_sampling_tokens_per_minute=100))


def test_what_never_reached_the_engine_costs_nothing() -> None:
    async def check(service: SamplerService) -> None:
        assert taken(service, 10) == 2
        service.cancel("s:sample:0:1")
        assert taken(service, 10, first=20) == 1

    running(ScriptedSampler(), check, tenants=limited(max_sampling_tokens_per_minute=100), engine_samples=1)


def test_weights_and_priorities_decide_who_is_next() -> None:
    sampler = ScriptedSampler()
    special = {
        "heavy": TenantTerms(share=TenantShare(3.0)),
        "first": TenantTerms(share=TenantShare(priority=Priority.HIGH)),
    }

    async def check(service: SamplerService) -> None:
        tenants = {"light": 0, "heavy": 1000, "first": 2000}
        for tenant, first in tenants.items():
            taken(service, 4 if tenant == "first" else 100, tenant, first=first)
        sampler.finish |= {f"s:sample:0:{number}" for number in range(3000)}
        await turns(service, 60)
        order = [int(each.rpartition(":")[2]) // 1000 for each in sampler.submitted[:40]]
        assert order[:4] == [2] * 4
        assert order[4:].count(1) == 27

    running(sampler, check, tenants=Tenants(special=special), engine_samples=1)
