"""Training and sampling on one compute thread. The tests count turns; they do not measure time."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping

import pytest

from twinkle.server.backends import compute_thread
from twinkle.server.backends.compute_thread import Compute, Lane


def _step_after(name: str) -> Callable[[str], Lane | None]:
    """Return a function that announces an optimizer step after the piece of this name."""
    return lambda result: Lane.STEPS if result == name else None


class Clock:
    """A clock that stands still except while a piece of a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Holds the compute thread until everything is in its lane; then each piece records its name."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.open = threading.Event()
        self.done: list[str] = []
        self._clock = clock or Clock()

    def piece(self, name: str, seconds: float = 0.0) -> Callable[[], str]:
        def work() -> str:
            self.open.wait(120)
            self._clock.now += seconds
            self.done.append(name)
            return name

        return work


async def run_all(
    pieces: list[tuple[str, Lane]], seconds: Mapping[Lane, float], sampling_share: float = 0.5
) -> list[str]:
    """Run pieces of one compute thread, which takes the given time for those of each lane; return their order."""
    clock = Clock()
    compute, gate = Compute(sampling_share, clock), Gate(clock)
    tasks = [asyncio.create_task(compute.run(gate.piece(name, seconds[lane]), lane)) for name, lane in pieces]
    await asyncio.sleep(0)
    gate.open.set()
    assert await asyncio.gather(*tasks) == [name for name, _ in pieces]
    compute.close()
    return gate.done


def test_lanes_get_their_share_of_the_time() -> None:
    """However much waits in one lane, the other lane gets its share. After "t0", "s0" to "s2" take as long as "t0"."""
    pieces = [(f"t{number}", Lane.TRAINING) for number in range(3)]
    pieces += [(f"s{number}", Lane.SAMPLING) for number in range(9)]
    done = asyncio.run(run_all(pieces, {Lane.TRAINING: 3.0, Lane.SAMPLING: 1.0}))
    assert done == ["t0", "s0", "s1", "s2", "s3", "t1", "s4", "s5", "s6", "t2", "s7", "s8"]


def test_a_smaller_share_of_sampling() -> None:
    pieces = [(f"t{number}", Lane.TRAINING) for number in range(6)]
    pieces += [(f"s{number}", Lane.SAMPLING) for number in range(3)]
    done = asyncio.run(run_all(pieces, dict.fromkeys(Lane, 1.0), sampling_share=0.2))
    assert done == ["t0", "s0", "t1", "t2", "t3", "s1", "t4", "t5", "s2"]


@pytest.mark.parametrize(("rounds", "other"), [(Lane.SAMPLING, Lane.TRAINING), (Lane.TRAINING, Lane.SAMPLING)])
def test_a_loop_that_never_pauses_does_not_keep_the_other_out(rounds: Lane, other: Lane) -> None:
    """A rollout against an optimizer step, and a stream of batches against a sample. Turns are equally long."""
    done: list[str] = []
    clock = Clock()

    async def main() -> None:
        compute = Compute(0.5, clock)

        def piece(name: str) -> None:
            clock.now += 1.0
            done.append(name)

        async def loop() -> None:
            while done.count("other") < 20:
                await compute.run(lambda: piece("loop"), rounds)

        async def others() -> None:
            for _ in range(20):
                asked = len(done)
                await compute.run(lambda: piece("other"), other)
                # What was under way when it was asked for, and what the loop had not used of its share.
                assert done[asked:].index("other") <= 3

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
            waiting.wait(120)
            done.append("begin")
            seconds = sum(sum(compute.run_waiting(Lane.TRAINING).values()) for _ in range(3))
            compute.let_sampling_run()
            compute.let_sampling_run()
            assert compute.step_seconds < 10, "the piece still runs, and is known to"
            done.append("end")
            return seconds

        first = asyncio.create_task(compute.run(long))
        others = [
            asyncio.create_task(compute.run(lambda: done.append("train"))),
            asyncio.create_task(compute.run(lambda: 1 // 0)),
            asyncio.create_task(compute.run(lambda: 1 // 0, Lane.SAMPLING)),
            asyncio.create_task(compute.run(lambda: done.append("sample"), Lane.SAMPLING)),
        ]
        await asyncio.sleep(0)
        waiting.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        for failed in results[2:4]:
            assert isinstance(failed, ZeroDivisionError), "an error reaches whoever asked, not who gave way"
        assert isinstance(results[0], float)
        assert await compute.run(lambda: "still there") == "still there"
        compute.close()

    asyncio.run(main())
    assert {*done} == {"begin", "train", "sample", "end"}
    assert done[:2] == ["begin", "train"]


def test_sampling_gets_its_share_in_the_middle_of_a_piece() -> None:
    """The sampler takes one turn after another. It gets the device whenever it has used less than its share."""
    done: list[str] = []
    clock = Clock()

    async def main() -> None:
        compute = Compute(0.2, clock)
        begun = threading.Event()

        def train() -> tuple[float, float]:
            began, begins = compute.training_clock(), clock.now
            begun.wait(120)
            for _ in range(8):
                clock.now += 2.0
                done.append("train")
                compute.let_sampling_run()
            return compute.training_clock() - began, clock.now - begins

        def turn() -> bool:
            clock.now += 0.25
            done.append("sample")
            return done.count("sample") < 12

        training = asyncio.create_task(compute.run(train))
        sampling = asyncio.create_task(compute.run(turn, Lane.SAMPLING, repeats=bool))
        await asyncio.sleep(0)
        begun.set()
        own, elapsed = await training
        assert own == 8 * 2.0, "its own time, without that of sampling"
        assert elapsed == own + 12 * 0.25
        await sampling
        compute.close()

    asyncio.run(main())
    two = ["train", "sample", "sample"]
    assert done == [*two, "sample", *two * 4, "train", "sample", "train", "train"]


@pytest.mark.parametrize("within", [True, False], ids=["in a piece", "between pieces"])
def test_turns_without_progress_do_not_keep_training_out(within: bool) -> None:
    """A sampler that is busy, and does nothing in its turns, takes hardly any time for each."""
    clock, trained, turns = Clock(), threading.Event(), 0

    async def main() -> None:
        compute = Compute(0.5, clock)

        def train() -> None:
            clock.now += 0.02
            if within:
                compute.let_sampling_run()

        def turn() -> bool:
            nonlocal turns
            turns += 1
            clock.now += 1e-6
            return not trained.is_set()

        sampling = asyncio.create_task(compute.run(turn, Lane.SAMPLING, repeats=bool))
        for _ in range(3):
            await asyncio.wait_for(compute.run(train), 30)
        trained.set()
        await sampling
        compute.close()

    asyncio.run(main())
    assert turns > 0


def test_a_piece_that_repeats_takes_turns_with_other_work() -> None:
    """Its caller gets the last result. It does not wait for the event loop between its turns."""
    clock = Clock()
    gate, turns = Gate(clock), 0

    async def main() -> int:
        compute = Compute(0.5, clock)

        def turn() -> int:
            nonlocal turns
            gate.piece("sample", 1.0)()
            turns += 1
            return turns

        sampling = asyncio.create_task(compute.run(turn, Lane.SAMPLING, repeats=lambda turns: turns < 4))
        training = [asyncio.create_task(compute.run(gate.piece(f"pass{number}", 1.0))) for number in range(2)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*training)
        last = await sampling
        compute.close()
        return last

    assert asyncio.run(main()) == 4
    assert gate.done == ["sample", "pass0", "sample", "pass1", "sample", "sample"]


def test_a_piece_that_repeats_ends_when_the_thread_is_closed() -> None:
    async def main() -> int:
        compute, turns = Compute(), itertools.count(1)
        sampling = asyncio.create_task(compute.run(lambda: next(turns), Lane.SAMPLING, repeats=lambda _turns: True))
        await compute.run(lambda: None)
        await asyncio.to_thread(compute.close)
        return await sampling

    assert asyncio.run(main()) > 0


@pytest.mark.parametrize("asked", ["repeats", "follows"])
def test_a_caller_whose_question_fails_gets_the_error_and_the_thread_goes_on(asked: str) -> None:
    async def main() -> None:
        compute = Compute()
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1, **{asked: lambda result: result // 0})  # type: ignore[arg-type]
        assert await compute.run(lambda: 2) == 2
        compute.close()

    asyncio.run(main())


def test_an_error_ends_a_piece_that_repeats() -> None:
    async def main() -> None:
        compute, turns = Compute(), iter([True, True, 0])
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: bool(1 // next(turns)), Lane.SAMPLING, repeats=bool)
        assert next(turns, None) is None
        assert not compute.samples
        compute.close()

    asyncio.run(main())


def test_what_training_computes_is_decided_when_its_turn_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling does not run between the call that asks for a turn and the work that follows."""
    monkeypatch.setattr(compute_thread, "_SOON", 10.0)  # it comes in a millisecond, but the machine may be busy
    clock = Clock()
    gate, ready = Gate(clock), ["a"]

    async def main() -> None:
        compute = Compute(0.5, clock)

        async def train() -> None:
            await compute.training_turn()
            await compute.run(gate.piece("train " + "".join(ready)))

        sampling = asyncio.create_task(
            compute.run(gate.piece("sample", 1.0), Lane.SAMPLING, repeats=lambda _: len(gate.done) < 4)
        )
        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        assert compute.samples
        ready.append("b")
        gate.open.set()
        await asyncio.gather(training, sampling)
        compute.close()

    asyncio.run(main())
    assert gate.done == ["sample", "train ab", "sample", "sample"]


@pytest.mark.parametrize("lane", [Lane.TRAINING, Lane.STEPS])
def test_a_turn_of_sampling_learns_that_training_is_next(lane: Lane) -> None:
    """It is next once sampling has used its share, and an optimizer step at once."""
    clock, came, asked = Clock(), threading.Event(), []

    async def main() -> None:
        compute = Compute(0.5, clock)

        def turn() -> None:
            clock.now += 1.0
            asked.append(compute.training_is_next())
            begun.set()
            came.wait(120)
            asked.append(compute.training_is_next())
            clock.now += 0.5
            asked.append(compute.training_is_next())

        begun = threading.Event()
        assert not compute.training_is_next(), "no turn runs"
        sampling = asyncio.create_task(compute.run(turn, Lane.SAMPLING))
        await asyncio.to_thread(begun.wait, 10)
        training = asyncio.create_task(compute.run(compute.training_is_next, lane))
        await asyncio.sleep(0)
        came.set()
        assert await training is False, "a turn of training runs"
        await sampling
        compute.close()

    asyncio.run(main())
    assert asked == [False, lane is Lane.STEPS, True]


def test_a_turn_in_the_middle_of_a_pass_is_not_ended_early() -> None:
    clock, asked = Clock(), []

    async def main() -> None:
        compute, ready = Compute(0.5, clock), threading.Event()

        def turn() -> None:
            clock.now += 5.0
            asked.append(compute.training_is_next())

        def train() -> None:
            ready.wait(120)
            clock.now += 1.0
            compute.let_sampling_run()

        tasks = [asyncio.create_task(compute.run(train)), asyncio.create_task(compute.run(turn, Lane.SAMPLING))]
        tasks.append(asyncio.create_task(compute.run(lambda: None)))
        await asyncio.sleep(0)
        ready.set()
        await asyncio.gather(*tasks)
        compute.close()

    asyncio.run(main())
    assert asked == [False]


def test_sampling_that_is_put_off_waits_for_all_training() -> None:
    """Until so many seconds of its share are due."""
    clock = Clock()
    gate = Gate(clock)

    async def main() -> None:
        compute = Compute(0.5, clock)
        compute.put_off_sampling(3.0)
        pieces = [("s0", Lane.SAMPLING), *((f"t{number}", Lane.TRAINING) for number in range(5)), ("s1", Lane.SAMPLING)]
        first = asyncio.create_task(compute.run(gate.piece("first", 0.0)))
        tasks = [asyncio.create_task(compute.run(gate.piece(name, 1.0), lane)) for name, lane in pieces]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *tasks)
        compute.close()

    asyncio.run(main())
    assert gate.done == ["first", "t0", "t1", "t2", "s0", "s1", "t3", "t4"]


def test_a_pass_and_the_step_that_follows_are_one_turn() -> None:
    """The event loop sends the step a moment after the pass has ended; work that arrived in between waits."""
    gate = Gate()

    async def main() -> None:
        compute = Compute()

        async def train() -> None:
            await compute.run(gate.piece("pass"), follows=_step_after("pass"))
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
            compute.run(gate.piece("pass"), follows=_step_after("pass")),
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
    """The time of sampling in the middle of that piece is not counted."""
    clock = Clock()

    async def main() -> tuple[Mapping[str, float], Mapping[str, float]]:
        compute = Compute(clock=clock)
        coming = threading.Event()

        def move(seconds: float) -> None:
            clock.now += seconds

        def other() -> None:
            move(4.0)
            compute.let_sampling_run()

        def long() -> tuple[Mapping[str, float], Mapping[str, float]]:
            assert coming.wait(120)
            return compute.run_waiting(Lane.TRAINING), compute.run_waiting(Lane.TRAINING)

        tasks = [
            asyncio.create_task(compute.run(long)),
            asyncio.create_task(compute.run(other, shares={"a": 0.75, "b": 0.25})),
            asyncio.create_task(compute.run(lambda: move(0.5), Lane.SAMPLING)),
        ]
        await asyncio.sleep(0)
        coming.set()
        seconds, *_ = await asyncio.gather(*tasks)
        compute.close()
        return seconds

    ran, nothing = asyncio.run(main())
    assert ran == {"a": 3.0, "b": 1.0}
    assert not nothing
    assert clock.now == 104.5


def test_a_step_of_the_optimizer_comes_first_but_not_twice_in_a_row() -> None:
    pieces = [(f"step{number}", Lane.STEPS) for number in range(3)]
    pieces += [(f"{lane.name[0]}{number}", lane) for lane in (Lane.SAMPLING, Lane.TRAINING) for number in range(2)]
    done = asyncio.run(run_all(pieces, {Lane.STEPS: 0.0, Lane.TRAINING: 2.0, Lane.SAMPLING: 2.0}))
    assert done == ["step0", "S0", "step1", "T0", "step2", "S1", "T1"]


def test_nobody_waits_for_a_step_that_a_failed_pass_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a tenant could keep the device idle with passes that fail at once."""
    waited: list[Compute] = []
    monkeypatch.setattr(Compute, "_comes", lambda compute, _lane: bool(waited.append(compute)))

    async def main() -> None:
        compute = Compute()
        assert await compute.run(lambda: "failed", follows=_step_after("ran")) == "failed"
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0, follows=lambda _: Lane.STEPS)
        assert await compute.run(lambda: "next") == "next"
        compute.close()

    asyncio.run(main())
    assert not waited


def test_no_work_is_accepted_after_the_end() -> None:
    async def main() -> None:
        compute = Compute()
        compute.close()
        with pytest.raises(RuntimeError, match="closed"):
            await compute.run(lambda: None)

    asyncio.run(main())


def test_a_fault_in_counting_time_reaches_the_caller_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        compute = Compute()
        with monkeypatch.context() as broken:
            broken.setattr(compute, "_end", lambda *_arguments, **_options: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await compute.run(lambda: 1)
        result = await compute.run(lambda: 2)
        compute.close()
        return result

    assert asyncio.run(main()) == 2
