"""A long pass lets the service loop go first, for a pass and its optimizer step.

Within its steps others get equal time.
"""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from twinkle.model.types import AdamParams
from twinkle.server.backends.compute_thread import Compute, Lane
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.services.training import long_passes
from twinkle.server.services.training.execution import Execution, GiveWay, StepLimit, Steps
from twinkle.server.services.training.long_passes import LongPasses, LoopTurns
from twinkle.server.types import Op, OpKind, OptimStep, Outcome


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class FakeExecution:
    """Passes of a few parts in one step, with a chance for others before each part. ``took`` records what ran."""

    def __init__(self, clock: Clock, parts: int, seconds: float) -> None:
        self.took: list[str] = []
        self._clock, self._parts, self._seconds = clock, parts, seconds

    def passes_in_steps(self, ops: Sequence[Op], _limit: StepLimit, give_way: GiveWay) -> Steps:
        for _ in range(self._parts):
            give_way()
            self.took.append(ops[0].adapter_id)
            self._clock.now += self._seconds
        yield [Outcome("application/json", b"done")]


def op(name: str) -> Op:
    return Op(name, 1, OpKind.FORWARD_BACKWARD, OptimStep(AdamParams(0.1)), b"")


def test_others_get_as_much_time_in_the_middle_of_a_step_as_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait all the time, and their work takes three times as long as a part of the step.

    Optimizer steps run at each part: they are short, and their time counts as training. Sampling may run at each part,
    too; its share of the time is the compute thread's business.
    """
    clock = Clock()
    monkeypatch.setattr(long_passes, "time", clock)
    execution = FakeExecution(clock, parts=8, seconds=1.0)

    async def main() -> tuple[list[Outcome], float]:
        compute, scheduler = Compute(), Scheduler(100)

        def waiting(lane: Lane) -> dict[str, float]:
            execution.took.append(lane.name)
            seconds = 0.25 if lane is Lane.STEPS else 3.0
            clock.now += seconds
            return {"other": seconds}

        def sample() -> None:
            execution.took.append("SAMPLING")
            clock.now += 0.5

        monkeypatch.setattr(compute, "run_waiting", waiting)
        monkeypatch.setattr(compute, "let_sampling_run", sample)
        passes = LongPasses(compute, scheduler, cast("Execution", execution), LoopTurns())
        try:
            return await passes.run([op("long")], "tenant", beside=True)
        finally:
            compute.close()

    outcomes, seconds = asyncio.run(main())
    assert [outcome.body for outcome in outcomes] == [b"done"]
    assert seconds == 8.0, "its own time, without that of others"
    step, train, sample = "STEPS", "TRAINING", "SAMPLING"
    alone, with_others = [step, sample, "long"], [step, train, sample, "long"]
    assert execution.took == [*alone, *with_others, *alone * 3, *with_others, *alone * 2]


def test_short_passes_of_the_same_tenant_do_not_use_up_the_turns_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as time of the tenant with the long pass, so the other tenant's pass comes right after them."""
    clock = Clock()
    monkeypatch.setattr(long_passes, "time", clock)
    execution = FakeExecution(clock, parts=6, seconds=1.0)
    work = [("greedy", 2.0), ("greedy", 2.0), ("other", 4.0), ("other", 4.0)]

    async def main() -> float:
        compute, scheduler = Compute(), Scheduler(100)

        def waiting(lane: Lane) -> dict[str, float]:
            if lane is not Lane.TRAINING or not work:
                return {}
            tenant_id, seconds = work.pop(0)
            execution.took.append(tenant_id)
            clock.now += seconds
            return {tenant_id: seconds}

        monkeypatch.setattr(compute, "run_waiting", waiting)
        passes = LongPasses(compute, scheduler, cast("Execution", execution), LoopTurns())
        try:
            return (await passes.run([op("long")], "greedy", beside=True))[1]
        finally:
            compute.close()

    assert asyncio.run(main()) == 6.0, "what is booked for the long pass is its own time"
    assert execution.took == [*["greedy", "long"] * 2, *["other", "long"] * 2, *["long"] * 2]


def test_idle_time_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that comes after the pass has run alone for long gets as much time as if the pass had just begun."""
    clock = Clock()
    monkeypatch.setattr(long_passes, "time", clock)
    execution = FakeExecution(clock, parts=12, seconds=1.0)

    async def main() -> None:
        compute, scheduler = Compute(), Scheduler(100)

        def waiting(lane: Lane) -> dict[str, float]:
            if clock.now < 8.0 or lane is not Lane.TRAINING:
                return {}
            execution.took.append("other")
            clock.now += 3.0
            return {"other": 3.0}

        monkeypatch.setattr(compute, "run_waiting", waiting)
        passes = LongPasses(compute, scheduler, cast("Execution", execution), LoopTurns())
        await passes.run([op("long")], "tenant", beside=True)
        compute.close()

    asyncio.run(main())
    assert execution.took == [*["long"] * 8, *["other", "long", "long"] * 2]


def test_one_long_pass_takes_a_step_at_a_time() -> None:
    """A batch of the service loop waits for only one of them, however many there are."""
    running: list[str] = []
    most = 0

    class Watched:
        def passes_in_steps(self, ops: Sequence[Op], _limit: StepLimit, _give_way: GiveWay) -> Steps:
            for _ in range(3):
                yield None
            yield [Outcome("application/json", b"done")]

    class Counting(Compute):
        async def run(self, work, lane=Lane.TRAINING):  # type: ignore[no-untyped-def]
            nonlocal most
            running.append("step")
            most = max(most, len(running))
            await asyncio.sleep(0.01)
            result = await super().run(work, lane)
            running.pop()
            return result

    async def main() -> None:
        compute = Counting()
        passes = LongPasses(compute, Scheduler(100), cast("Execution", Watched()), LoopTurns())
        await asyncio.gather(*(passes.run([op(name)], "tenant", beside=True) for name in ("a", "b", "c")))
        compute.close()

    asyncio.run(main())
    assert most == 1


def test_no_more_than_four_run_beside_the_loop() -> None:
    async def main() -> None:
        compute = Compute()
        passes = LongPasses(compute, Scheduler(100), cast("Execution", None), LoopTurns())
        for _ in range(4):
            assert not passes.beside.locked()
            await passes.beside.acquire()
        assert passes.beside.locked()
        compute.close()

    asyncio.run(main())


def test_an_idle_loop_is_not_waited_for() -> None:
    async def main() -> None:
        turns = LoopTurns()
        await asyncio.wait_for(turns.others(), 5)
        turns.begin()
        turns.end(idle=True)
        await asyncio.wait_for(turns.others(), 5)

    asyncio.run(main())


def test_two_turns_and_no_more() -> None:
    async def main() -> None:
        turns = LoopTurns()
        turns.begin()
        waiting = asyncio.create_task(turns.others())
        for _ in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            turns.end(idle=False)
            turns.begin()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


def test_a_loop_that_runs_dry_ends_the_wait() -> None:
    async def main() -> None:
        turns = LoopTurns()
        turns.begin()
        waiting = asyncio.create_task(turns.others())
        await asyncio.sleep(0)
        turns.end(idle=True)
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())
