"""Rounds of training, publishing and sampling on a simulated device with a clock of its own.

The device takes the times of an H200 with the 1b model. Training and publishing take turns with sampling by the rules
of :class:`DeviceShare` and :class:`Gathering`; a turn of sampling ends early when training is next. Clients need some
tens of milliseconds between two requests.
"""

import heapq
import random
from bisect import bisect_left
from dataclasses import dataclass, field

import pytest

from twinkle.server.backends.device_share import DeviceShare
from twinkle.server.scheduling.gathering import Gathering, ReadyPasses

COST, BUDGET = 1024, 16 * 1024  # tokens of a pass, and of a batch
TURN = 0.05  # seconds after which a turn of sampling starts nothing new
AHEAD, TOKENS, ROWS = 8, 128, 8  # tokens of a flight, of a sample; samples of a session
TRAIN = ((1, 0.0205), (2, 0.033), (4, 0.0565), (8, 0.106), (16, 0.206))  # seconds of a batch, by passes
STEP, PUBLISH, PROMPTS = 0.002, 0.007, (0.004, 0.0014)  # PROMPTS: seconds of a pass, and of each prompt in it
DECODE = ((1, 0.0019), (16, 0.002), (48, 0.0024), (128, 0.0043), (256, 0.007))  # seconds of a step, by sequences


def seconds_for(points: tuple[tuple[int, float], ...], size: int) -> float:
    place = min(max(1, bisect_left([each for each, _ in points], size)), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (size - left) / (right - left)


@dataclass
class Session:
    number: int
    trains: bool = True
    samples: bool = True
    drawn: int = 0  # tokens of each of its samples
    prompted: bool = False
    began: float = 0.0
    rounds: list[float] = field(default_factory=list)  # seconds


@dataclass
class Device:
    """``rules``: turns end early, and samples are put off. Without it, passes wait for others, and that is all."""

    sessions: list[Session]
    rules: bool = True
    seed: int = 0
    spread: float = 0.0  # seconds over which the sessions begin
    now: float = 0.0
    batches: list[int] = field(default_factory=list)
    steps: int = 0
    decoded: int = 0  # tokens

    def run(self, rounds: int) -> "Device":
        self._random = random.Random(self.seed)
        self._left = dict.fromkeys((each.number for each in self.sessions), rounds)
        self._share, self._gathering = DeviceShare(0.4), Gathering()
        self._events: list[tuple[float, int, str]] = []
        self._passes: dict[int, float] = {}  # when each pass that is ready arrived
        self._publishing: list[tuple[float, int]] = []
        self._sampling: list[Session] = []
        self._training_since: float | None = None
        for session in self.sessions:
            self._begin(session, self._random.uniform(0, self.spread))
        while self._events or self._passes or self._publishing or self._sampling:
            self._take_turn()
        return self

    @property
    def rows(self) -> float:
        return self.decoded / self.steps

    def _take_turn(self) -> None:
        began, held = self.now, self._held()
        if self._training_waits(held) and not (self._sampling and self._share.sampling_is_due):
            if self._publishing and (held is not None or not self._passes or self._publishing[0] < self._first_pass()):
                self._publish()
            else:
                self._train()
            self._share.count_training(began, self.now, began if self._sampling else None)
        elif self._sampling:
            self._sample()
            self._share.count_sampling(began, self.now, self._training_since)
        else:
            times = [*([] if held is None else [held]), *(at for at, _, _ in self._events[:1])]
            self.now = max(self.now, min(times))

    def _first_pass(self) -> tuple[float, int]:
        return min((at, number) for number, at in self._passes.items())

    def _held(self) -> float | None:
        """Admit what has arrived, and return until when the ready passes wait."""
        while self._events and self._events[0][0] <= self.now:
            at, number, kind = heapq.heappop(self._events)
            self._admit(at, self.sessions[number], kind)
        self._share.patience = self._gathering.patience() if self.rules else 0.0
        if not self._passes:
            return None
        cost = COST * len(self._passes)
        ready = ReadyPasses({str(number) for number in self._passes}, cost, max(0, BUDGET - cost))
        return self._gathering.wait_until(ready, self.now, sampling=bool(self._sampling))

    def _training_waits(self, held: float | None) -> bool:
        waits = bool(self._publishing) or (bool(self._passes) and held is None)
        if not waits:
            self._training_since = None
        elif self._training_since is None:
            self._training_since = self.now
        return waits

    def _admit(self, at: float, session: Session, kind: str) -> None:
        name = str(session.number)
        if kind == "pass":
            self._passes[session.number] = at
            self._gathering.arrived(name, f"tenant-{name}", COST, at)
        elif kind == "publish":
            self._publishing.append((at, session.number))
        else:
            session.drawn, session.prompted = 0, False
            self._sampling.append(session)
            self._gathering.sampling(name, at)

    def _after(self, seconds: float, session: Session, kind: str) -> None:
        heapq.heappush(self._events, (self.now + seconds, session.number, kind))

    def _begin(self, session: Session, seconds: float) -> None:
        session.began = self.now + seconds
        self._after(seconds, session, "pass" if session.trains else "sample")

    def _train(self) -> None:
        batch = [self.sessions[number] for number in list(self._passes)[: BUDGET // COST]]
        seconds = seconds_for(TRAIN, len(batch))
        self._gathering.started(self.now)
        self._gathering.times.measure(COST * len(batch), seconds)
        self.batches.append(len(batch))
        self.now += seconds + STEP * len(batch)
        for session in batch:
            del self._passes[session.number]
            self._gathering.ended(str(session.number), self.now)
            if session.samples:
                self._after(self._random.uniform(0.005, 0.025), session, "publish")
            else:
                self._end(session, 0.002)

    def _publish(self) -> None:
        _, number = self._publishing.pop(0)
        self.now += PUBLISH
        self._after(self._random.uniform(0.005, 0.025), self.sessions[number], "sample")

    def _sample(self) -> None:
        """Take a turn. Without prompts, the next flight starts before the results of the last one are read."""
        began, over, flies, done = self.now, False, False, []
        while self._sampling and (flies or not over):
            waiting = [each for each in self._sampling if not each.prompted]
            flies = not over and not waiting
            self._decode([each for each in self._sampling if each.prompted], 2 if waiting else AHEAD)
            if waiting:
                self.now += PROMPTS[0] + PROMPTS[1] * len(waiting)
            for session in waiting:
                session.prompted, session.drawn = True, 1
            done += [session for session in self._sampling if session.drawn >= TOKENS]
            self._sampling = [session for session in self._sampling if session.drawn < TOKENS]
            over = over or self.now >= began + TURN or (self.rules and self._training_is_next(began))
        for session in done:
            self._gathering.sampled(str(session.number), self.now)
            self._end(session, self._random.uniform(0.01, 0.05))

    def _training_is_next(self, began: float) -> bool:
        waits = self._training_waits(self._held())
        return waits and not self._share.is_due_after(began, self.now, self._training_since)

    def _decode(self, sessions: list[Session], tokens: int) -> None:
        if sessions:
            self.now += tokens * seconds_for(DECODE, ROWS * len(sessions))
            self.steps += tokens
            self.decoded += tokens * ROWS * len(sessions)
            for session in sessions:
                session.drawn += tokens

    def _end(self, session: Session, seconds: float) -> None:
        session.rounds.append(self.now - session.began)
        self._left[session.number] -= 1
        if self._left[session.number]:
            self._begin(session, seconds)


def loops(count: int) -> list[Session]:
    return [Session(number) for number in range(count)]


def compared(count: int, seed: int, spread: float) -> tuple[Device, Device]:
    """Return the device after the same rounds with the rules and without them."""
    return tuple(Device(loops(count), rules, seed, spread).run(12) for rules in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("spread", [0.0, 0.6])
@pytest.mark.parametrize("count", [4, 16, 32])
def test_samples_of_tenants_in_a_loop_decode_together(count: int, spread: float) -> None:
    pairs = [compared(count, seed, spread) for seed in range(4)]
    assert sum(ours.rows for ours, _ in pairs) > 1.05 * sum(without.rows for _, without in pairs)
    assert sum(ours.now for ours, _ in pairs) < sum(without.now for _, without in pairs)


def test_sixteen_tenants_fill_most_of_the_decode_steps() -> None:
    devices = [Device(loops(16), seed=seed, spread=0.3).run(12) for seed in range(4)]
    assert sum(device.rows for device in devices) / len(devices) > 0.7 * 16 * ROWS


def test_a_tenant_alone_takes_as_long_as_without_the_rules() -> None:
    ours, without = compared(1, 0, 0.0)
    assert ours.now == without.now
    assert ours.steps == without.steps


def test_a_tenant_that_only_trains_is_as_fast_beside_loops_as_before() -> None:
    """Its passes come one after another, so training always has work. Sampling still gets its share of the time."""
    with_rules, without = (
        Device([*loops(4), Session(4, samples=False)], rules, spread=0.3).run(12) for rules in (True, False)
    )
    trainer, trainer_before = with_rules.sessions[4].rounds, without.sessions[4].rounds
    assert max(trainer) <= max(trainer_before) + TURN
    assert sum(trainer) < 1.1 * sum(trainer_before)
    assert with_rules.now < 1.1 * without.now


def test_a_tenant_that_only_samples_is_not_put_off() -> None:
    """As in a chat."""
    with_rules, without = (
        Device([*loops(8), Session(8, trains=False)], rules, spread=0.3).run(12) for rules in (True, False)
    )
    assert sum(with_rules.sessions[8].rounds) < 1.1 * sum(without.sessions[8].rounds)
