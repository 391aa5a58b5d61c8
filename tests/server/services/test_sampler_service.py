"""The sampler service with the mock's sampler and with a scripted one."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from twinkle.errors import (
    CheckpointError,
    GoneError,
    InvalidInputError,
    QuotaError,
    ShuttingDownError,
    TwinkleError,
    TwinkleServerError,
)
from twinkle.model.types import LoraSpec
from twinkle.sampler.types import (
    Finished,
    Progress,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplerNumbers,
    SamplingParams,
)
from twinkle.server.backends.compute_thread import Compute, Lane
from twinkle.server.backends.mock import MockSampler, MockTrainer
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.ids import RequestId
from twinkle.server.scheduling.gathering import Gathering
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.tenancy.tenants import Tenants, TenantTerms
from twinkle.server.types import SamplingSessionRecord


class ScriptedSampler:
    """A sampler that finishes the requests in ``finish`` and records all calls."""

    def __init__(self) -> None:
        self.requests: dict[str, SampleRequest] = {}
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.finish: set[str] = set()
        self.error: Exception | None = None
        self.loaded: list[str] = []
        self.versions: list[str] = []

    def publish(self, version_id: str, adapter_id: str) -> None:
        self.versions.append(version_id)

    def load_version(self, version_id: str, directory: str) -> None:
        self.loaded.append(version_id)
        self.versions.append(version_id)

    def retire(self, version_id: str) -> None:
        assert version_id not in {request.version_id for request in self.requests.values()}, "it is in use"
        self.versions.remove(version_id)

    def version_ids(self) -> list[str]:
        return list(self.versions)

    def submit(self, request: SampleRequest) -> None:
        self.requests[request.request_id] = request
        self.submitted.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.requests.pop(request_id, None)

    busy = False  # a submitted request wakes it

    def step(self) -> list[Finished | Progress]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        done = [request_id for request_id in self.requests if request_id in self.finish]
        return [Finished(request_id, result(self.requests.pop(request_id))) for request_id in done]


def result(request: SampleRequest) -> SampleResult:
    sequence = SampledSequence(np.array([1, 2]), np.array([-1, -2], np.float32), "length")
    return SampleResult([sequence] * request.num_samples)


def session(tenant: str = "t", version: str | None = None, directory: str | None = None) -> SamplingSessionRecord:
    return SamplingSessionRecord("s:sample:0", "s", 0, tenant, "m", "m", None, version, directory, 0.0)


def request(number: int | str = 0, version: str | None = None, **fields) -> SampleRequest:
    params = {"max_tokens": 40, "seed": 1, "stop_at_eos": False, **fields.pop("params", {})}
    return SampleRequest(f"s:sample:0:{number}", version, np.array([5, 6, 7]), SamplingParams(**params), **fields)


async def generated(
    service: SamplerService, of: SamplingSessionRecord, wanted: SampleRequest
) -> AsyncGenerator[Progress | SampleResult, None]:
    """Yield the events of one request."""
    async with aclosing(service.generate(of, [wanted])) as events:
        async for _, event in events:
            yield event


def running(sampler, check: Callable[[SamplerService], Awaitable[None]], root: Path = Path("/none"), **options) -> None:
    async def main() -> None:
        compute = Compute()
        service = SamplerService(sampler, compute, DataDir(root), **options)
        await service.start()
        try:
            await asyncio.wait_for(check(service), 30)
        finally:
            await service.stop()
            compute.close()

    asyncio.run(main())


async def turns(service: SamplerService, count: int = 3) -> None:
    """Let the service run a few turns, and wait until the results of each are handed over."""
    for _ in range(count):
        service.sweep(0.0)
        while service._turn_due or service._orders:  # the turn has not begun
            await asyncio.sleep(0.0005)
        await service._compute.run(lambda: None, Lane.SAMPLING)  # the turn is over
        await asyncio.get_running_loop().run_in_executor(service._encoding, lambda: None)
        await asyncio.sleep(0)


def mock_sampler() -> MockSampler:
    trainer = MockTrainer()
    trainer.create_adapter("a", LoraSpec(8, seed=1))
    return MockSampler(trainer)


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_hands_over_tokens_as_they_come() -> None:
    async def check(service: SamplerService) -> None:
        wanted = request(num_samples=2, stream=True, topk_sample_logprobs=3)
        events = [event async for event in generated(service, session(), wanted)]
        *progress, last = events
        assert len(progress) == 6  # two sequences of 40 tokens, 16 at a time
        for index, sequence in enumerate(last.sequences):
            own = [event for event in progress if event.index == index]
            np.testing.assert_array_equal(np.concatenate([event.tokens for event in own]), sequence.tokens)
            np.testing.assert_array_equal(np.concatenate([event.logprobs for event in own]), sequence.logprobs)
            top = np.concatenate([event.topk_logprobs.logprobs for event in own])
            np.testing.assert_array_equal(top, sequence.topk_logprobs.logprobs)
            assert [event.stop_reason for event in own] == [None, None, "length"]
        (whole,) = [event async for event in generated(service, session(), request(1, num_samples=2))]
        np.testing.assert_array_equal(whole.sequences[1].tokens, last.sequences[1].tokens)
        assert service.tokens_sampled == 160

    running(mock_sampler(), check)


def test_leaving_early_cancels_in_the_engine() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        async def listen() -> None:
            async with aclosing(generated(service, session(), request())) as events:
                async for _ in events:
                    raise AssertionError("nothing comes")

        listener = asyncio.create_task(listen())
        await turns(service)
        assert sampler.submitted == ["s:sample:0:0"]
        listener.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener
        await turns(service)
        assert sampler.cancelled == ["s:sample:0:0"]
        assert service.status()["waiting_samples"] == 0
        sampler.finish.add("s:sample:0:0")  # the id may be used again
        assert len([event async for event in generated(service, session(), request())]) == 1

    running(sampler, check)


def test_leaving_after_some_events() -> None:
    sampler = mock_sampler()

    async def check(service: SamplerService) -> None:
        async with aclosing(generated(service, session(), request(stream=True, params={"max_tokens": 4000}))) as events:
            async for event in events:
                assert isinstance(event, Progress)
                break
        await turns(service)
        assert not sampler.busy
        assert service.tokens_sampled == 0

    running(sampler, check)


def test_failures_of_generate_are_raised() -> None:
    sampler = mock_sampler()

    async def check(service: SamplerService) -> None:
        async def ask(wanted: SampleRequest) -> object:
            return [event async for event in generated(service, session(), wanted)]

        with pytest.raises(InvalidInputError, match="max_tokens"):
            await ask(request(params={"max_tokens": 10**6}))
        sampler.step = lambda: 1 // 0
        with pytest.raises(TwinkleServerError, match="internal error"):
            await ask(request())

    running(sampler, check)


def test_generate_counts_with_the_samples_of_its_tenant() -> None:
    async def check(service: SamplerService) -> None:
        service.sample(session(), request(0))
        with pytest.raises(QuotaError):
            service.sample(session(), request(1))
        with pytest.raises(QuotaError):
            await anext(generated(service, session(), request(1)))
        service.sample(session("other"), request(2))
        service.cancel("s:sample:0:0")
        service.sample(session(), request(3))

    running(ScriptedSampler(), check, tenants=Tenants(TenantTerms(LimitsConfig(max_waiting_samples_per_tenant=1))))


def test_stopping_lets_listeners_go() -> None:
    async def main() -> None:
        compute = Compute()
        service = SamplerService(ScriptedSampler(), compute, DataDir(Path("/none")))
        await service.start()
        listener = asyncio.create_task(anext(generated(service, session(), request())))
        await turns(service)
        await service.stop()
        with pytest.raises(TwinkleError, match="shutting down"):
            await listener
        compute.close()

    asyncio.run(main())


# --- futures ----------------------------------------------------------------------------------------------------------


def test_a_number_belongs_to_one_request() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        for _ in range(3):
            service.sample(session(), request(5), digest=b"one")
        with pytest.raises(InvalidInputError, match="seq_id: got 5"):
            service.sample(session(), request(5), digest=b"two")
        sampler.finish.add("s:sample:0:5")
        await turns(service)
        assert await service.wait(RequestId("s:sample:0", 5), 60) is not None
        with pytest.raises(InvalidInputError, match="seq_id: got 5"):
            service.sample(session(), request(5), digest=b"two")
        assert sampler.submitted == ["s:sample:0:5"]

    running(sampler, check)


def test_cancelling() -> None:
    """Cancel samples in the engine, in the queue before it, and samples that do not exist (any more)."""
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        for number in range(3):
            service.sample(session(), request(number))
        await turns(service)
        assert sampler.submitted == ["s:sample:0:0", "s:sample:0:1"]
        for number in (1, 2, 7):
            service.cancel(f"s:sample:0:{number}")
        await turns(service)
        assert sampler.cancelled == ["s:sample:0:1"]  # number 2 never reached the engine
        for number in (1, 2):
            outcome = await service.wait(RequestId("s:sample:0", number), 60)
            assert json.loads(outcome.body) == {"error": "cancelled by its client", "category": "user"}
        with pytest.raises(GoneError):
            await service.wait(RequestId("s:sample:0", 7), 60)
        sampler.finish.add("s:sample:0:0")
        await turns(service)
        done = await service.wait(RequestId("s:sample:0", 0), 60)
        service.cancel("s:sample:0:0")
        assert await service.wait(RequestId("s:sample:0", 0), 60) == done
        assert not done.failed

    running(sampler, check, engine_samples=2)


def test_samples_that_nobody_asks_for_are_cancelled() -> None:
    """In the engine and before it.

    A client that returns is told to send them again; a waiting client is not affected.
    """
    sampler = ScriptedSampler()

    def later(service: SamplerService, seconds: float) -> None:
        service._asked = {name: at - seconds for name, at in service._asked.items()}

    async def check(service: SamplerService) -> None:
        for number in range(3):
            service.sample(session(), request(number))
        streamed = asyncio.create_task(anext(generated(service, session("streaming"), request("x"))))
        await turns(service)
        later(service, 59)
        assert not service.unasked_sessions(60)
        # A poll for one sample is a sign of life for all samples of the client.
        await service.wait(RequestId("s:sample:0", 1), 0.01)
        later(service, 59)
        assert not service.unasked_sessions(60)
        later(service, 2)
        assert service.unasked_sessions(60) == {"s"}
        assert service.cancel_unasked("other", 60) == 0
        assert service.cancel_unasked("s", 60) == 3
        await turns(service)
        assert sorted(sampler.cancelled) == ["s:sample:0:0", "s:sample:0:1"]
        assert not streamed.done(), "it ends with its connection"
        streamed.cancel()
        with pytest.raises(GoneError, match="send it again"):
            await service.wait(RequestId("s:sample:0", 1), 60)
        told = await service.completions.after("s:sample:0", 0, 0, 5, 0.0)
        assert [(each.request_id, each.size) for each in told] == [(f"s:sample:0:{n}", None) for n in range(3)]
        service.sample(session(), request(9))  # and there is room again
        sampler.finish.add("s:sample:0:9")
        await turns(service)
        assert not (await service.wait(RequestId("s:sample:0", 9), 60)).failed

    running(sampler, check, engine_samples=2)


def test_acknowledged_results_are_freed() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        sampler.finish |= {"s:sample:0:0", "s:sample:0:1"}
        for number in range(3):
            service.sample(session(), request(number))
        await turns(service)
        service.acknowledge("s:sample:0", ["s:sample:0:0", "s:sample:0:2", "s:sample:0:9", "nonsense"])
        service.acknowledge("s:sample:1", ["s:sample:0:1"])  # it belongs to another session
        with pytest.raises(GoneError):
            await service.wait(RequestId("s:sample:0", 0), 60)
        assert await service.wait(RequestId("s:sample:0", 1), 60) is not None
        with service.delivering("s:sample:0:1") as delivery:
            delivery.complete = True
        assert await service.wait(RequestId("s:sample:0", 2), 0) is None  # it is not done, so there is nothing to free
        assert service._futures.unfetched_bytes("t") == 0

    running(sampler, check)


def test_one_tenants_crowd_does_not_keep_others_out() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        for number in range(10):
            service.sample(session("crowd"), request(number))
        service.sample(session("lonely"), request(100))
        await turns(service)
        assert sampler.submitted == ["s:sample:0:0", "s:sample:0:100"]
        sampler.finish |= {"s:sample:0:0", "s:sample:0:100"}
        await turns(service)
        assert sampler.submitted[2:] == ["s:sample:0:1", "s:sample:0:2"]

    running(sampler, check, engine_samples=2)


def test_a_bug_in_the_engine_fails_what_runs_and_nothing_else() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        service.sample(session(), request(0))
        await turns(service)
        sampler.error = ArithmeticError("bug")
        await turns(service)
        outcome = await service.wait(RequestId("s:sample:0", 0), 60)
        assert json.loads(outcome.body)["category"] == "server"
        assert "bug" not in outcome.body.decode()
        sampler.finish.add("s:sample:0:1")
        service.sample(session(), request(1))
        await turns(service)
        assert not (await service.wait(RequestId("s:sample:0", 1), 60)).failed

    running(sampler, check)


def test_an_engine_that_fails_in_any_way_does_not_end_the_loop() -> None:
    class Broken(ScriptedSampler):
        broken = False
        turns = 0

        def cancel(self, request_id: str) -> None:
            super().cancel(request_id)
            raise ArithmeticError("cancel")

        @property
        def busy(self) -> bool:
            if self.broken:
                raise ArithmeticError("busy")
            return bool(self.requests)

        def step(self) -> list[Finished | Progress]:
            self.turns += 1
            return super().step()

    sampler = Broken()

    async def check(service: SamplerService) -> None:
        async def works(number: int) -> None:
            sampler.finish.add(f"s:sample:0:{number}")
            service.sample(session(), request(number))
            assert not (await service.wait(RequestId("s:sample:0", number), 60)).failed

        service.sample(session(), request(0))
        await turns(service)
        service.cancel("s:sample:0:0")
        await works(1)
        service.sample(session(), request(2))
        await turns(service)
        sampler.broken = True
        assert json.loads((await service.wait(RequestId("s:sample:0", 2), 60)).body)["category"] == "server"
        sampler.broken = False
        await works(3)
        sampler.requests["ghost"] = request("ghost")  # belongs to no client and makes every turn fail
        for _ in range(3):
            sampler.error = ArithmeticError("ghost")
            await turns(service, 1)
        sampler.error = ArithmeticError("ghost")
        before = sampler.turns
        await asyncio.sleep(0.05)
        assert sampler.turns - before < 3  # it is not retried all the time
        del sampler.requests["ghost"]
        await turns(service)
        await works(4)

    running(sampler, check)


def test_shutting_down_lets_readers_go_at_once() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        listener = asyncio.create_task(anext(generated(service, session(), request())))
        await turns(service)
        service.release_waiters()
        with pytest.raises(ShuttingDownError):
            await listener
        await turns(service)
        assert sampler.cancelled == ["s:sample:0:0"]
        with pytest.raises(ShuttingDownError):
            await anext(generated(service, session(), request()))

    running(sampler, check)


def test_the_lowest_number_that_a_client_may_wait_for() -> None:
    """A finished sample counts too until the client has it, because the next server would not know it."""
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        for number in (3, 4, 10**9 + 1):
            service.sample(session(), request(number))
        assert service.lowest_number("s:sample:0", 9) == 3
        assert service.lowest_number("s:sample:0", 10**9 + 5) == 10**9 + 1
        assert service.lowest_number("s:sample:1", 9) == 9
        sampler.finish.add("s:sample:0:3")
        await turns(service)
        assert await service.wait(RequestId("s:sample:0", 4), 0) is None
        assert service.lowest_number("s:sample:0", 9) == 3
        (told,) = await service.completions.after("s:sample:0", 0, 0, 5, 0.0)
        await service.completions.after("s:sample:0", 0, told.place, 0, 0.0)
        assert service.lowest_number("s:sample:0", 9) == 4
        service.cancel("s:sample:0:4")
        service.cancel(f"s:sample:0:{10**9 + 1}")
        assert service._numbers == {}

    running(sampler, check)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_versions_are_pinned_while_in_use_and_come_back_from_disk(tmp_path: Path) -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        for number, version in enumerate("abc"):
            (tmp_path / version).mkdir()
            service.sample(session(version=version, directory=version), request(number, version))
        await turns(service)
        assert sampler.loaded == ["a", "b", "c"]
        assert set(sampler.versions) == {"a", "b", "c"}  # more than the limit, but all in use
        sampler.finish |= {"s:sample:0:0", "s:sample:0:2"}
        await turns(service)
        assert set(sampler.versions) == {"b", "c"}  # of the idle ones, a was used least recently
        service.release_version("b")
        service.release_version("c")
        await turns(service)
        assert sampler.versions == ["b"]  # its request is not done
        service.cancel("s:sample:0:1")
        await turns(service)
        assert sampler.versions == []
        sampler.finish.add("s:sample:0:3")
        service.sample(session(version="a", directory="a"), request(3, "a"))
        await turns(service)
        assert sampler.loaded == ["a", "b", "c", "a"]
        assert not (await service.wait(RequestId("s:sample:0", 3), 60)).failed

    running(sampler, check, tmp_path, max_versions=2)


def test_idle_versions_are_dropped_also_when_nobody_samples() -> None:
    sampler = ScriptedSampler()

    async def check(service: SamplerService) -> None:
        sampler.publish("v", "adapter")
        await turns(service)
        await asyncio.sleep(0.02)
        await turns(service)
        assert sampler.versions == []

    running(sampler, check, idle_version_seconds=0.01)


def test_weights_that_are_gone(tmp_path: Path) -> None:
    async def check(service: SamplerService) -> None:
        service.sample(session(version="v", directory="v"), request(0, "v"))
        await turns(service)
        outcome = json.loads((await service.wait(RequestId("s:sample:0", 0), 60)).body)
        assert outcome["category"] == "user"
        assert "gone" in outcome["error"]
        assert str(tmp_path) not in outcome["error"]
        with pytest.raises(CheckpointError):
            await anext(generated(service, session(version="v", directory="v"), request(1, "v")))

    running(ScriptedSampler(), check, tmp_path)


class CountingSampler(ScriptedSampler):
    """A sampler that asks in its turns whether other work is next, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.asks: Callable[[], bool] | None = None
        self.told: list[bool] = []

    def end_turns_when(self, other_work_is_next: Callable[[], bool]) -> None:
        self.asks = other_work_is_next

    def numbers(self) -> SamplerNumbers:
        return SamplerNumbers(2, 6)

    def step(self) -> list[Finished | Progress]:
        assert self.asks is not None
        self.told.append(self.asks())
        return super().step()


def test_a_sampler_that_can_end_its_turns_asks_the_compute_thread() -> None:
    sampler = CountingSampler()

    async def check(service: SamplerService) -> None:
        assert sampler.asks == service._compute.training_is_next
        await turns(service)
        assert sampler.told[-1] is False

    running(sampler, check)


def test_decode_steps_are_reported_where_the_sampler_counts_them() -> None:
    async def counted(service: SamplerService) -> None:
        assert (service.status()["decode_steps"], service.status()["decoded_tokens"]) == (2, 6)
        read = {reading.instrument.name: reading.value for reading in service.readings("m")}
        assert (read["twinkle_decode_steps_total"], read["twinkle_decoded_tokens_total"]) == (2, 6)

    async def uncounted(service: SamplerService) -> None:
        assert "decode_steps" not in service.status()
        assert not any("decode" in reading.instrument.name for reading in service.readings("m"))

    running(CountingSampler(), counted)
    running(ScriptedSampler(), uncounted)


def test_samples_are_put_off_as_long_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathering, "patience", lambda _self: 0.125)

    async def check(service: SamplerService) -> None:
        service.sample(session(), request(0))
        await turns(service)
        assert service._compute._share.patience == 0.125

    running(ScriptedSampler(), check)
