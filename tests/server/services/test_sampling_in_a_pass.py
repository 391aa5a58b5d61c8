"""Samples that run in the middle of a training pass, through both services. Errors of one do not reach the other."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.servers.model_services import model_service
from twinkle.errors import TwinkleServerError
from twinkle.model.types import Datum, LoraSpec, TrainFailure, TrainItem, TrainResult
from twinkle.sampler.types import SampleRequest, SamplingParams
from twinkle.server import ids
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import MockSampler, MockTrainer, mock_model
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.training.model_service import ModelService
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.types import (
    CreateAdapter,
    Op,
    OpKind,
    Outcome,
    RunRecord,
    SamplingSessionRecord,
    SessionRecord,
    TrainPass,
)

SPEC = LoraSpec(8, seed=1)
RUN = ids.run_id("s-1", 0)
SESSION = SamplingSessionRecord("s-1:sample:0", "s-1", 0, "chats", "mock", "mock", None, None, None, 0.0)
REQUEST = SampleRequest("chat", None, np.array([5, 6, 7]), SamplingParams(max_tokens=40, seed=1, stop_at_eos=False))


class Interruptible(MockTrainer):
    """A trainer whose passes give way to sampling until ``sampled`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled = threading.Event()
        self.error: Exception | None = None

    def in_steps(
        self,
        items: Sequence[TrainItem],
        *,
        train: bool,
        limit: Callable[[], int | None] | None,
        give_way: Callable[[], None] | None = None,
    ) -> Generator[None, None, list[TrainResult | TrainFailure]]:
        assert give_way is not None
        until = time.monotonic() + 120
        while not self.sampled.wait(0.001):
            assert time.monotonic() < until, "sampling did not run in the middle of the pass"
            give_way()
        if self.error is not None:
            raise self.error
        return (yield from super().in_steps(items, train=train, limit=limit, give_way=give_way))


@asynccontextmanager
async def serving(
    root: Path, trainer: Interruptible, sampler: MockSampler
) -> AsyncIterator[tuple[ModelService, SamplerService]]:
    store, compute, now = await Store.open(root), Compute(), time.time()
    training = model_service(replace(mock_model(), trainer=trainer, sampler=sampler), store, compute, root)
    sampling = SamplerService(sampler, compute, DataDir(root))
    await training.start()
    await sampling.start()
    try:
        await store.sessions.create(SessionRecord("s-1", "trains", now, now))
        run = RunRecord(RUN, "s-1", 0, "trains", "mock", "mock", SPEC, now, now)
        made = await training.create(run, Op(RUN, 0, OpKind.CREATE, CreateAdapter(SPEC), b"create"))
        assert not (await outcome_of(training, made)).failed
        yield training, sampling
        await sampling.stop()
        await training.stop()
    finally:
        compute.close()
        await store.close()


async def outcome_of(training: ModelService, request: str) -> Outcome:
    outcome = await training.wait(ids.RequestId.parse(request), RUN, 20)
    assert outcome is not None
    return outcome


def one_pass() -> Op:
    data = (Datum(np.array([3, 4, 5]), np.array([4, 5, 6])),)
    return Op(RUN, 1, OpKind.FORWARD_BACKWARD, TrainPass(data, "cross_entropy", {}), b"pass")


def test_a_sample_is_finished_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    trainer = Interruptible()

    async def main() -> None:
        async with serving(tmp_path, trainer, MockSampler(trainer)) as (training, sampling):
            accepted = await training.submit(one_pass())
            (result,) = await sampling.results(SESSION, [REQUEST])
            assert len(result.sequences[0].tokens) == 40
            assert await training.wait(ids.RequestId.parse(accepted), RUN, 0) is None, "the pass still runs"
            trainer.sampled.set()
            assert not (await outcome_of(training, accepted)).failed
            assert sampling.status()["waiting_samples"] == sampling.status()["queued_samples"] == 0

    asyncio.run(main())


def test_a_sampler_that_fails_in_the_middle_of_a_pass_fails_its_samples_alone(tmp_path: Path) -> None:
    trainer = Interruptible()

    class Failing(MockSampler):
        def step(self) -> list:
            raise RuntimeError("a bug")

    async def main() -> None:
        async with serving(tmp_path, trainer, Failing(trainer)) as (training, sampling):
            accepted = await training.submit(one_pass())
            with pytest.raises(TwinkleServerError, match="internal error"):
                await sampling.results(SESSION, [REQUEST])
            trainer.sampled.set()
            assert not (await outcome_of(training, accepted)).failed

    asyncio.run(main())


def test_a_pass_that_fails_leaves_samples_alone(tmp_path: Path) -> None:
    trainer = Interruptible()
    trainer.error = RuntimeError("a bug")

    async def main() -> None:
        async with serving(tmp_path, trainer, MockSampler(trainer)) as (training, sampling):
            accepted = await training.submit(one_pass())
            events = sampling.generate(SESSION, [replace(REQUEST, stream=True)])
            await anext(events)  # it has begun in the middle of the pass
            trainer.sampled.set()
            assert (await outcome_of(training, accepted)).failed
            rest = [event async for _, event in events]
            assert len(rest[-1].sequences[0].tokens) == 40

    asyncio.run(main())
