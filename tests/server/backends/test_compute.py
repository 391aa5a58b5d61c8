"""Training and sampling on one compute thread. The tests count turns; they do not measure time."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from twinkle.server.backends.compute_thread import Compute, Lane


class Gate:
    """Holds the compute thread until everything is in its lane; then each piece records its name."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.done: list[str] = []

    def piece(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.open.wait(10)
            self.done.append(name)
            return name

        return work


async def run_all(gate: Gate, pieces: list[tuple[str, Lane]]) -> Compute:
    compute = Compute()
    tasks = [asyncio.create_task(compute.run(gate.piece(name), lane)) for name, lane in pieces]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(*tasks) == [name for name, _ in pieces]
    return compute


def test_lanes_alternate() -> None:
    """However much waits in one lane, the other lane gets its turn after one piece of it."""
    gate = Gate()
    pieces = [(f"t{number}", Lane.TRAINING) for number in range(5)] + [("s0", Lane.SAMPLING), ("s1", Lane.SAMPLING)]
    asyncio.run(run_all(gate, pieces)).close()
    assert gate.done == ["t0", "s0", "t1", "s1", "t2", "t3", "t4"]


@pytest.mark.parametrize(("rounds", "other"), [(Lane.SAMPLING, Lane.TRAINING), (Lane.TRAINING, Lane.SAMPLING)])
def test_a_loop_that_never_pauses_delays_the_other_by_one_turn(rounds: Lane, other: Lane) -> None:
    """A rollout against an optimizer step, and a stream of batches against a sample."""
    done: list[str] = []

    async def main() -> None:
        compute = Compute()

        async def loop() -> None:
            while done.count("other") < 20:
                await compute.run(lambda: done.append("loop"), rounds)

        async def others() -> None:
            for _ in range(20):
                asked = len(done)
                await compute.run(lambda: done.append("other"), other)
                assert done[asked:].index("other") <= 1, "only what was under way when it was asked for comes before"

        await asyncio.gather(loop(), others())
        compute.close()

    asyncio.run(main())


def test_what_is_cancelled_before_its_turn_does_not_run() -> None:
    gate = Gate()

    async def main() -> None:
        compute = Compute()
        first = asyncio.create_task(compute.run(gate.piece("first")))
        unwanted = asyncio.create_task(compute.run(gate.piece("unwanted"), Lane.SAMPLING))
        last = asyncio.create_task(compute.run(gate.piece("last")))
        await asyncio.sleep(0)
        unwanted.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, last)
        compute.close()

    asyncio.run(main())
    assert gate.done == ["first", "last"]


def test_errors_reach_whoever_asked() -> None:
    async def main() -> None:
        compute = Compute()
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0)
        assert await compute.run(lambda: 3) == 3
        compute.close()

    asyncio.run(main())


def test_what_waits_can_run_in_the_middle_of_another_piece() -> None:
    done: list[str] = []

    async def main() -> None:
        compute = Compute()
        waiting = threading.Event()

        def long() -> float:
            waiting.wait(10)
            done.append("begin")
            seconds = sum(sum(compute.run_waiting(lane).values()) for lane in Lane for _ in range(3))
            assert compute.step_seconds < 10, "the piece still runs, and is known to"
            done.append("end")
            return seconds

        first = asyncio.create_task(compute.run(long))
        others = [
            asyncio.create_task(compute.run(lambda: done.append("train"))),
            asyncio.create_task(compute.run(lambda: 1 // 0)),
            asyncio.create_task(compute.run(lambda: done.append("sample"), Lane.SAMPLING)),
        ]
        await asyncio.sleep(0)
        waiting.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert isinstance(results[2], ZeroDivisionError), "an error reaches whoever asked, not who gave way"
        assert isinstance(results[0], float)
        assert await compute.run(lambda: "still there") == "still there"
        compute.close()

    asyncio.run(main())
    assert done == ["begin", "train", "sample", "end"]


def test_a_pass_and_the_step_that_follows_are_one_turn() -> None:
    """The event loop sends the step a moment after the pass has ended; work that arrived in between waits."""
    gate = Gate()

    async def main() -> None:
        compute = Compute()

        async def train() -> None:
            await compute.run(gate.piece("pass"), step_follows="pass".__eq__)
            await compute.run(gate.piece("step"), Lane.STEPS)

        work = [train(), *(compute.run(gate.piece(f"sample{number}"), Lane.SAMPLING) for number in range(2))]
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*tasks)
        compute.close()

    asyncio.run(main())
    assert gate.done == ["pass", "step", "sample0", "sample1"]


def test_a_step_that_does_not_come_holds_nobody_up() -> None:
    gate = Gate()

    async def main() -> None:
        compute = Compute()
        work = [
            compute.run(gate.piece("pass"), step_follows="pass".__eq__),
            compute.run(gate.piece("sample"), Lane.SAMPLING),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        compute.close()

    asyncio.run(main())
    assert gate.done == ["pass", "sample"]


def test_time_in_the_middle_of_another_piece_is_counted_by_tenant() -> None:
    async def main() -> tuple[Mapping[str, float], Mapping[str, float]]:
        compute = Compute()
        coming = threading.Event()

        def long() -> tuple[Mapping[str, float], Mapping[str, float]]:
            assert coming.wait(10)
            return compute.run_waiting(Lane.TRAINING), compute.run_waiting(Lane.TRAINING)

        first = asyncio.create_task(compute.run(long))
        other = asyncio.create_task(compute.run(lambda: time.sleep(0.01), shares={"a": 0.75, "b": 0.25}))
        await asyncio.sleep(0)
        coming.set()
        seconds, _ = await asyncio.gather(first, other)
        compute.close()
        return seconds

    ran, nothing = asyncio.run(main())
    assert ran["a"] == 3 * ran["b"]
    assert ran["a"] + ran["b"] >= 0.01
    assert not nothing


def test_a_step_of_the_optimizer_comes_first_but_not_twice_in_a_row() -> None:
    gate = Gate()
    pieces = [(f"step{number}", Lane.STEPS) for number in range(3)]
    pieces += [(f"{lane.name[0]}{number}", lane) for lane in (Lane.SAMPLING, Lane.TRAINING) for number in range(2)]
    asyncio.run(run_all(gate, pieces)).close()
    assert gate.done == ["step0", "T0", "step1", "S0", "step2", "T1", "S1"]


def test_nobody_waits_for_a_step_that_a_failed_pass_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a tenant could keep the device idle with passes that fail at once."""
    waited: list[Compute] = []
    monkeypatch.setattr(Compute, "_step_comes", lambda compute: bool(waited.append(compute)))

    async def main() -> None:
        compute = Compute()
        assert await compute.run(lambda: "failed", step_follows="ran".__eq__) == "failed"
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0, step_follows=lambda _: True)
        assert await compute.run(lambda: "next") == "next"
        compute.close()

    asyncio.run(main())
    assert not waited
