"""Batches of passes that wait for more, through the training service. The rule itself is in ``test_gathering``."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.servers.model_services import model_service
from twinkle.model.types import AdamParams, Datum, LoraSpec
from twinkle.sampler.types import SampleRequest, SamplingParams
from twinkle.server import ids
from twinkle.server.backends.compute_thread import Compute, Lane
from twinkle.server.backends.mock import mock_model
from twinkle.server.scheduling.gathering import Gathering, ReadyPasses
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.state.store import Store
from twinkle.server.types import (
    CreateAdapter,
    Op,
    OpKind,
    OptimStep,
    Outcome,
    RunRecord,
    SamplingSessionRecord,
    SessionRecord,
    TrainPass,
)

SPEC = LoraSpec(8, seed=1)
FAR = 1e6  # seconds: a wait that only an arrival ends


@asynccontextmanager
async def serving(root: Path, compute: Compute) -> AsyncIterator[ModelService]:
    """Run a service with the runs of two tenants, whose sessions are s-0 and s-1."""
    store, now = await Store.open(root), time.time()
    service = model_service(mock_model(), store, compute, root)
    await service.start()
    try:
        for number in range(2):
            session = f"s-{number}"
            await store.sessions.create(SessionRecord(session, f"tenant-{number}", now, now))
            run = RunRecord(ids.run_id(session, 0), session, 0, f"tenant-{number}", "mock", "mock", SPEC, now, now)
            made = await service.create(run, Op(run.run_id, 0, OpKind.CREATE, CreateAdapter(SPEC), b"create"))
            assert not (await outcome_of(service, made)).failed
        yield service
        await service.stop()
    finally:
        compute.close()
        await store.close()


async def outcome_of(service: ModelService, request: str) -> Outcome:
    outcome = await service.wait(ids.RequestId.parse(request), None, 20)  # type: ignore[arg-type]
    assert outcome is not None
    return outcome


def one_pass(number: int, seq: int = 1) -> Op:
    data = (Datum(np.array([3, 4, 5]), np.array([4, 5, 6])),)
    run = ids.run_id(f"s-{number}", 0)
    return Op(run, seq, OpKind.FORWARD_BACKWARD, TrainPass(data, "cross_entropy", {}), b"pass")


def one_step(number: int, seq: int = 1) -> Op:
    return Op(ids.run_id(f"s-{number}", 0), seq, OpKind.OPTIM_STEP, OptimStep(AdamParams(0.1)), b"step")


def test_a_batch_waits_for_a_pass_that_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of other tenants run meanwhile."""

    async def main() -> None:
        async with serving(tmp_path, Compute()) as service:
            asked: list[ReadyPasses] = []

            def wait_until(ready: ReadyPasses, now: float, *, sampling: bool) -> float | None:
                asked.append(ready)
                return now + FAR if len(ready.sessions) < 2 else None

            monkeypatch.setattr(service.context.gathering, "wait_until", wait_until)
            first = await service.submit(one_pass(0))
            step = await service.submit(one_step(1))
            assert not (await outcome_of(service, step)).failed
            assert service.status()["batches"] == 0, "the first pass waits"
            second = await service.submit(one_pass(1, seq=2))
            for request in (first, second):
                assert not (await outcome_of(service, request)).failed
            assert service.status()["batches"] == 1
            assert service.status()["merge_ratio"] == 2.0
            assert asked[-1].sessions == {"s-0", "s-1"}

    asyncio.run(main())


def test_a_wait_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(tmp_path, Compute()) as service:
            until: list[float] = []

            def wait_until(_ready: ReadyPasses, now: float, *, sampling: bool) -> float | None:
                until[:] = until or [now + 0.05]
                return until[0] if now < until[0] else None

            monkeypatch.setattr(service.context.gathering, "wait_until", wait_until)
            assert not (await outcome_of(service, await service.submit(one_pass(0)))).failed
            assert time.monotonic() >= until[0]

    asyncio.run(main())


@pytest.mark.parametrize("expected", [True, False])
def test_passes_that_arrive_during_a_turn_of_sampling_share_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: bool
) -> None:
    """Which passes start is decided when the turn ends, if more are expected; else the batch is made at once."""

    async def main() -> None:
        compute, sampled = Compute(), threading.Event()
        async with serving(tmp_path, compute) as service:
            monkeypatch.setattr(service.context.gathering, "wait_until", lambda *_, **__: None)
            monkeypatch.setattr(service.context.gathering, "more_come", lambda *_: expected)
            turn = asyncio.create_task(compute.run(lambda: sampled.wait(120), Lane.SAMPLING))
            await asyncio.sleep(0)
            requests = [await service.submit(one_pass(0)), await service.submit(one_pass(1))]
            sampled.set()
            for request in requests:
                assert not (await outcome_of(service, request)).failed
            await turn
            assert service.status()["batches"] == (1 if expected else 2)

    asyncio.run(main())


def test_the_rule_is_told_of_passes_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    for name in ("arrived", "ended", "sampling", "sampled"):
        monkeypatch.setattr(Gathering, name, lambda _self, session, *_, name=name: told.append((name, session)))

    async def main() -> None:
        compute = Compute()
        async with serving(tmp_path, compute) as service:
            await outcome_of(service, await service.submit(one_pass(1)))
            sampler = service.context.model.sampler
            assert sampler is not None
            sampling = SamplerService(sampler, compute, service.context.files, gathering=service.context.gathering)
            await sampling.start()
            session = SamplingSessionRecord("s-1:sample:0", "s-1", 0, "tenant-1", "mock", "mock", None, None, None, 0.0)
            await sampling.results(session, [SampleRequest("a", None, np.array([5]), SamplingParams(max_tokens=3))])
            await sampling.stop()
            assert not service.context.gathering.times.estimate()[0], "one batch says nothing about its fixed cost"

    asyncio.run(main())
    assert told == [("arrived", "s-1"), ("ended", "s-1"), ("sampling", "s-1"), ("sampled", "s-1")]
