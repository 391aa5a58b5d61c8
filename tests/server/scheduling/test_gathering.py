"""Batches that wait for passes which are about to arrive, on a simulated device with a clock of its own.

The device computes passes, for a fixed time and a time for each tenant, and otherwise turns of sampling, in which all
samples that run gain tokens. Sessions train, sample and begin again.
"""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from twinkle.server.scheduling.gathering import LONGEST, Gathering, ReadyPasses

COST = 1024  # tokens of each pass
BUDGET = 16 * COST
TURN = 0.05  # seconds of a turn of sampling


@dataclass
class Session:
    number: int
    tenant: str
    turns: int  # turns of sampling between two passes
    think: float  # seconds from the end of a pass to the samples, and from the last sample to the next pass
    left: int = 0
    ready_at: float = 0.0
    publishes: bool = False  # it has trained, and is publishing before it samples


@dataclass
class Device:
    """Runs the rounds of some sessions. ``delays``: how long each pass waited while the device could have run it."""

    sessions: list[Session]
    fixed: float = 0.060
    token: float = 0.009 / COST
    jitter: float = 0.02
    gathering: Gathering | None = field(default_factory=Gathering)
    now: float = 0.0
    batches: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    sampling_seconds: float = 0.0
    idle_seconds: float = 0.0

    def run(self, rounds: int) -> "Device":
        self._random = random.Random(0)
        self._left = dict.fromkeys((each.number for each in self.sessions), rounds)
        self._arrivals: list[tuple[float, int]] = []
        self._ready: dict[int, Session] = {}
        self._sampling: list[Session] = []
        for session in self.sessions:
            self._arrive_after(session, self._random.uniform(0, self.jitter))
        while self._arrivals or self._ready or self._sampling:
            self._admit()
            until = self._until()
            if self._ready and until is None:
                self._train()
            elif self._sampling:
                self._sample()
            else:
                times = [time for time in (until, self._arrivals[0][0] if self._arrivals else None) if time is not None]
                self.idle_seconds += max(0.0, min(times) - self.now)
                self.now = max(self.now, min(times))
        return self

    def _until(self) -> float | None:
        if not self._ready or self.gathering is None:
            return None
        cost = COST * len(self._ready)
        ready = ReadyPasses({str(number) for number in self._ready}, cost, BUDGET - cost)
        return self.gathering.wait_until(ready, self.now, sampling=bool(self._sampling))

    def _arrive_after(self, session: Session, seconds: float) -> None:
        heapq.heappush(self._arrivals, (self.now + seconds, session.number))

    def _admit(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            at, number = heapq.heappop(self._arrivals)
            session = self.sessions[number]
            if session.publishes:
                session.publishes, session.left = False, session.turns
                self._sampling.append(session)
                if self.gathering is not None:
                    self.gathering.sampling(str(number), at)
                continue
            session.ready_at = self.now  # what came in the middle of a turn could not have started before
            self._ready[number] = session
            if self.gathering is not None:
                self.gathering.arrived(str(number), session.tenant, COST, at)

    def _train(self) -> None:
        batch, self._ready = self._ready, {}
        seconds = self.fixed + self.token * COST * len(batch)
        self.batches.append(len(batch))
        self.delays += [self.now - session.ready_at for session in batch.values()]
        if self.gathering is not None:
            self.gathering.started(self.now)
            self.gathering.times.measure(COST * len(batch), seconds)
        self.now += seconds
        for session in batch.values():
            if self.gathering is not None:
                self.gathering.ended(str(session.number), self.now)
            if session.turns:
                session.publishes = True
                self._arrive_after(session, session.think + self._random.uniform(0, self.jitter))
            else:
                self._begin_again(session)

    def _sample(self) -> None:
        self.now += TURN
        self.sampling_seconds += TURN
        for session in list(self._sampling):
            session.left -= 1
            if not session.left:
                self._sampling.remove(session)
                if self.gathering is not None:
                    self.gathering.sampled(str(session.number), self.now)
                self._begin_again(session)

    def _begin_again(self, session: Session) -> None:
        self._left[session.number] -= 1
        if self._left[session.number]:
            self._arrive_after(session, session.think + self._random.uniform(0, self.jitter))


def in_step(count: int, turns: int = 13) -> list[Session]:
    return [Session(number, f"tenant-{number}", turns, think=0.03) for number in range(count)]


def test_tenants_in_step_share_nearly_every_batch() -> None:
    """Their requests arrive over 20 ms."""
    device = Device(in_step(16)).run(30)
    assert sum(device.batches) / len(device.batches) > 12
    assert device.batches.count(16) > 20


@pytest.mark.parametrize("jitter", [0.05, 0.1])
def test_tenants_stay_in_step_where_they_would_drift_apart(jitter: float) -> None:
    """Their requests arrive over the time of a turn and more. Without the rule nearly every batch has one pass."""
    device = Device(in_step(16), jitter=jitter).run(30)
    without = Device(in_step(16), jitter=jitter, gathering=None).run(30)
    assert len(without.batches) > 200
    assert len(device.batches) < 80
    assert device.now < 0.8 * without.now, "everybody is faster"


def test_tenants_stay_in_step_where_a_pass_has_a_small_fixed_cost() -> None:
    """As on a GPU without launch times: 8 ms, and 12.7 ms for each tenant."""
    sizes = {"fixed": 0.008, "token": 0.0127 / COST, "jitter": 0.06}
    device, without = Device(in_step(16), **sizes).run(30), Device(in_step(16), gathering=None, **sizes).run(30)
    assert len(device.batches) < len(without.batches) / 3
    assert device.now < without.now


def test_tenants_that_only_train_share_batches_too() -> None:
    device, without = Device(in_step(8, turns=0)).run(30), Device(in_step(8, turns=0), gathering=None).run(30)
    assert len(device.batches) < len(without.batches)
    assert device.now <= without.now


@pytest.mark.parametrize("turns", [0, 13])
def test_a_tenant_alone_never_waits(turns: int) -> None:
    device, without = Device(in_step(1, turns)).run(30), Device(in_step(1, turns), gathering=None).run(30)
    assert max(device.delays) == 0
    assert device.now == without.now


def test_a_tenant_does_not_wait_for_its_own_other_sessions() -> None:
    sessions = [Session(number, "tenant", 13, think=0.03) for number in range(4)]
    assert max(Device(sessions).run(30).delays) == 0


def test_nobody_waits_where_time_grows_with_the_tokens() -> None:
    """As on a CPU: a batch of several tenants takes as long as their batches one after another."""
    device = Device(in_step(8), fixed=0.001, token=0.5 / COST).run(10)
    without = Device(in_step(8), fixed=0.001, token=0.5 / COST, gathering=None).run(10)
    assert max(device.delays) == 0
    assert device.now == without.now


@pytest.mark.parametrize("seed", range(5))
def test_tenants_out_of_step_wait_no_longer_than_the_bound(seed: int) -> None:
    """Rounds of all lengths, and thinking times that differ. Sampling has the device while passes wait."""
    numbers = random.Random(seed)
    sessions = [Session(n, f"tenant-{n}", numbers.randrange(2, 30), numbers.uniform(0, 0.5)) for n in range(6)]
    device = Device([*sessions], jitter=0.2).run(40)
    alike = [Session(each.number, each.tenant, each.turns, each.think) for each in sessions]
    without = Device(alike, jitter=0.2, gathering=None).run(40)
    assert max(device.delays) <= LONGEST + TURN  # a wait that ends in the middle of a turn ends with it
    assert sum(device.delays) / len(device.delays) < 0.02
    assert device.now < 1.05 * without.now


def test_an_idle_device_waits_no_longer_than_a_batch_less_saves() -> None:
    """Without samples to compute, waiting costs the device's time."""
    device = Device(in_step(8, turns=0), fixed=0.02, jitter=0.08).run(40)
    assert max(device.delays) <= 0.02 + 1e-9


def test_sampling_loses_nothing_to_waiting() -> None:
    """While passes wait, samples are computed, and they are computed together."""
    device, without = Device(in_step(16), jitter=0.05).run(20), Device(in_step(16), jitter=0.05, gathering=None).run(20)
    assert device.sampling_seconds <= without.sampling_seconds
    assert device.sampling_seconds / device.now > without.sampling_seconds / without.now
    assert device.idle_seconds < 0.05 * device.now


def test_a_full_batch_does_not_wait() -> None:
    gathering = ready_for_waiting()
    full = ReadyPasses({"a"}, BUDGET, 0)
    assert gathering.wait_until(full, 10.52, sampling=True) is None
    assert gathering.wait_until(ReadyPasses({"a"}, COST, BUDGET - COST), 10.52, sampling=True) is not None


def test_after_a_wait_in_vain_the_next_batch_does_not_wait() -> None:
    gathering = ready_for_waiting()
    ready = ReadyPasses({"a"}, COST, BUDGET - COST)
    until = gathering.wait_until(ready, 10.52, sampling=True)
    assert until is not None
    assert gathering.wait_until(ready, until, sampling=True) is None, "it does not wait any longer"
    gathering.started(until)
    assert gathering.wait_until(ready, 10.52, sampling=True) is None, "another batch, as if at the same time"
    gathering.started(until)
    assert gathering.wait_until(ready, 10.52, sampling=True) is not None


def test_a_session_that_has_left_is_forgotten() -> None:
    gathering = ready_for_waiting()
    gathering.started(100.0)
    gathering.arrived("a", "tenant-a", COST, 100.0)
    assert gathering.wait_until(ReadyPasses({"a"}, COST, BUDGET), 100.0, sampling=True) is None


def looping(sessions: str = "ab", *, fixed: float = 0.06, samples: str = "ab") -> Gathering:
    """Return the state after two rounds of one second, in which ``samples`` also sampled. All train again now."""
    gathering = Gathering()
    gathering.times.measure(COST, fixed + 0.009)
    gathering.times.measure(8 * COST, fixed + 8 * 0.009)
    for now in (0.0, 1.0, 2.0):
        for session in sessions:
            gathering.arrived(session, f"tenant-{session}", COST, now)
        for session in sessions if now < 2 else "":
            gathering.ended(session, now + 0.1)
        for session in samples if now < 2 else "":
            gathering.sampling(session, now + 0.2)
            gathering.sampled(session, now + 0.9)
    return gathering


def test_samples_are_put_off_where_all_train_and_sample_in_rounds() -> None:
    gathering = looping()
    assert gathering.patience() == pytest.approx(LONGEST)
    for session in "ab":
        gathering.arrived(session, f"tenant-{session}", COST, 2.0)  # a second pass in the same round
        gathering.ended(session, 2.0)
        gathering.ended(session, 2.0)
        gathering.sampling(session, 2.1)
        gathering.arrived(session, f"tenant-{session}", COST, 2.4)
    assert gathering.patience() == pytest.approx(0.25 * 0.4), "a quarter of the shorter round"


def test_samples_are_not_put_off_for_or_by_others() -> None:
    assert looping("a", samples="a").patience() == 0, "a tenant alone"
    assert looping(samples="a").patience() == 0, "session b only trains, so its passes bring no samples"
    assert looping(fixed=0.0).patience() == 0, "as on a CPU, where nothing is gained"
    gathering = looping()
    gathering.sampling("chat", 2.0)
    gathering.sampling("chat", 2.0)
    gathering.sampled("chat", 2.1)
    assert gathering.patience() == 0, "a session that does not train waits for a sample"
    gathering.sampled("chat", 2.2)
    assert gathering.patience() > 0


def ready_for_waiting() -> Gathering:
    """Return the state in which session a's pass is ready at 10.52, and b's is expected at 10.53."""
    gathering = Gathering()
    gathering.times.measure(COST, 0.069)
    gathering.times.measure(8 * COST, 0.132)
    for number in range(21):
        now = number / 2
        for session in "ab":
            gathering.arrived(session, f"tenant-{session}", COST, now + (0.03 if session == "b" else 0.02))
        gathering.started(now + 0.1)
        for session in "ab":
            gathering.ended(session, now + 0.2)
    gathering.arrived("a", "tenant-a", COST, 10.52)
    return gathering
