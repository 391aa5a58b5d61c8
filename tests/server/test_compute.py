"""Training and sampling on one thread: turns are counted, not timed."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from twinkle.server.backends.compute_thread import Compute, Lane


class Gate:
    """Holds the compute thread until everything is in its lane; then each piece writes down its name."""

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
    """However much waits in one lane, the other goes on after one piece of it."""
    gate = Gate()
    pieces = [(f"t{number}", Lane.TRAINING) for number in range(5)] + [("s0", Lane.SAMPLING), ("s1", Lane.SAMPLING)]
    asyncio.run(run_all(gate, pieces)).close()
    assert gate.done == ["t0", "s0", "t1", "s1", "t2", "t3", "t4"]


@pytest.mark.parametrize(("rounds", "other"), [(Lane.SAMPLING, Lane.TRAINING), (Lane.TRAINING, Lane.SAMPLING)])
def test_a_loop_that_never_pauses_delays_the_other_by_one_turn(rounds: Lane, other: Lane) -> None:
    """A rollout and an optimizer step; a stream of batches and a sample."""
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
            seconds = sum(compute.run_waiting(lane) for lane in Lane for _ in range(3))
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


def test_a_piece_that_comes_soon_is_waited_for() -> None:
    """The event loop sends an optimizer step a moment after the pass before it has ended."""

    async def main() -> tuple[float, float]:
        compute = Compute()
        loop, coming = asyncio.get_running_loop(), threading.Event()

        def long() -> tuple[float, float]:
            asyncio.run_coroutine_threadsafe(compute.run(lambda: None, Lane.SAMPLING), loop)
            asyncio.run_coroutine_threadsafe(compute.run(coming.set), loop)
            return compute.run_waiting(Lane.TRAINING, 10.0), compute.run_waiting(Lane.TRAINING, 0.01)

        seconds = await compute.run(long)
        assert coming.is_set()
        compute.close()
        return seconds

    ran, nothing = asyncio.run(main())
    assert ran > 0
    assert nothing == 0
