"""Decides whether a batch of passes waits a moment for passes that are about to arrive, and whether samples wait for
training.

Tenants in a loop (train, publish, sample, train again) that are in step could share every batch, but their requests
arrive over some tens of milliseconds: a batch that starts with the first of them leaves out the others, and from then
on they are out of step. A short wait keeps them together, where it pays:

- A pass must have a considerable fixed cost, the time that it takes however few tokens it has. It is estimated from the
  measured times of small and large batches. On a GPU small passes take nearly as long as larger ones; on a CPU the time
  grows with the tokens, so that nothing is gained, and no batch waits.
- A batch waits only for passes that are expected. The time at which a session's next pass arrives is estimated from its
  earlier rounds: how long the pass came after the end of its samples, after their beginning, or after the end of its
  last pass, whichever happened last. A batch does not wait for a session that has no regular rounds, is overdue, or
  would come too late.
- The wait is bounded: by ``LONGEST`` seconds; while samples use the device, by the time that the batch will take; and
  while the device is idle, by the fixed cost, which is all that one batch less can save. A batch never waits twice.
- After a wait in which no pass arrived, some batches do not wait.
- A tenant alone never waits. A batch that is full, or that has a pass which is overdue, does not wait either.

Samples wait, too. A decode step takes nearly as long for few sequences as for many, so it pays to train and publish for
all sessions in step before their samples begin. While all that the device has to do is for such sessions, samples may
be put off until ``LONGEST`` seconds of their share of the time are due, or a quarter of a round, if that is less. They
still get their share. Samples of sessions that do not train, such as chats, are never put off, nor those of a tenant
alone, nor those that would wait for a session that does not sample.

Plain Python; the caller gives the times, in seconds of one clock. Belongs to one thread.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

LONGEST = 0.2  # seconds that a batch waits at most
_LEAST_FIXED = 0.1  # fraction of the time of one session's pass: for a smaller fixed cost no batch waits
_ROUNDS = 3  # of a session, from which the arrival of its next pass is estimated
_LEAST_ERROR = 0.005  # seconds: no estimate is better
_FIRST_ERROR = 0.1  # fraction of the delay: the error that is assumed during a session's first rounds
_SPREAD = 3  # a pass counts as overdue so many times the error after its estimate
_PUT_OFF = 0.25  # fraction of a session's round: the most of their share for which samples are put off
_REMEMBERED = 60.0  # seconds for which a session without any activity is remembered
_MOST_SKIPPED = 8  # batches that do not wait after several waits in vain, including the one that has just waited
_KEPT_TIMES = 5  # measured times of batches of about one size; the shortest counts


class _Event(Enum):
    """The kinds of events after which the next pass of a session is expected."""

    TRAINED = auto()  # the session's last pass ended
    SAMPLES = auto()  # the session began to sample
    SAMPLED = auto()  # the session's last sample ended


class _Delay:
    """How long after an event a session's next pass arrives, from its last rounds."""

    def __init__(self, seconds: float) -> None:
        self._last = deque([seconds], maxlen=_ROUNDS)

    def observe(self, seconds: float) -> None:
        self._last.append(seconds)

    def estimate(self) -> tuple[float, float]:
        """Return the delay that is expected, and its uncertainty.

        The delay is the median of the last rounds, so one round that differs, such as one with a save, has no effect.
        During the first rounds it is the delay of the last one.
        """
        if len(self._last) < _ROUNDS:
            return self._last[-1], max(_LEAST_ERROR, _FIRST_ERROR * self._last[-1])
        ordered = sorted(self._last)
        nearest = min(after - before for before, after in pairwise(ordered))
        return ordered[_ROUNDS // 2], max(_LEAST_ERROR, nearest)


@dataclass
class _Session:
    tenant_id: str
    cost: int  # of its last pass
    seen_at: float  # the time of its last event
    passes: int = 0  # passes that have arrived and not ended
    samples: int = 0  # samples that have begun and not ended
    arrived_at: float | None = None  # when the first pass of its present round arrived
    round: float = 0.0  # seconds of its last round, from pass to pass
    samples_too: bool = False  # it sampled in its last round
    events: dict[_Event, float] = field(default_factory=dict)  # the last event of each kind since its last pass arrived
    delays: dict[_Event, _Delay] = field(default_factory=dict)

    def note(self, event: _Event, now: float) -> None:
        self.events.pop(event, None)  # the newest event is the last one in the dict
        self.events[event] = self.seen_at = now

    def arrive(self, now: float) -> None:
        if not self.passes:
            self.samples_too = _Event.SAMPLES in self.events
            self.round = 0.0 if self.arrived_at is None else now - self.arrived_at
            self.arrived_at = now
        for event, at in self.events.items() if not self.passes else ():
            delay = self.delays.get(event)
            if delay is None:
                self.delays[event] = _Delay(now - at)
            else:
                delay.observe(now - at)
        self.events.clear()
        self.passes += 1
        self.seen_at = now

    def expected(self, now: float, deadline: float) -> float | None:
        """Return the latest time at which its next pass is expected; None if it is not expected by the deadline."""
        if self.passes or not self.events:
            return None
        event, at = next(reversed(self.events.items()))
        delay = self.delays.get(event)
        if delay is None:
            return None
        seconds, error = delay.estimate()
        latest = at + seconds + _SPREAD * error
        return latest if error <= LONGEST and at + seconds <= deadline and now < latest else None


class PassTimes:
    """The measured times of batches of passes, from which it estimates a fixed cost and a cost for each token."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[tuple[float, int]]] = {}  # (seconds, cost), by the size of the cost

    def measure(self, cost: int, seconds: float) -> None:
        """Note how long a batch took. ``cost``: that of its passes together, in tokens."""
        self._measured.setdefault(cost.bit_length(), deque(maxlen=_KEPT_TIMES)).append((seconds, cost))

    def estimate(self) -> tuple[float, float]:
        """Return the fixed seconds of a batch and the seconds of each token, from the smallest and the largest batches.

        (0, 0) until batches of several sizes were measured.
        """
        if len(self._measured) < 2:
            return 0.0, 0.0
        (few, small), (many, large) = (min(self._measured[size]) for size in (min(self._measured), max(self._measured)))
        if large <= small:
            return 0.0, 0.0
        token = max(0.0, (many - few) / (large - small))
        return max(0.0, min(few, few - token * small)), token


@dataclass(frozen=True)
class ReadyPasses:
    """The passes that could start now: the sessions of their runs, their cost, and the room that the batch has left."""

    sessions: Collection[str]
    cost: int
    room: int


class Gathering:
    """Knows the rounds of the sessions that train on one model, and decides how long a batch waits for more passes."""

    def __init__(self) -> None:
        self.times = PassTimes()
        self._sessions: dict[str, _Session] = {}
        self._strangers: Counter[str] = Counter()  # samples of sessions that do not train, by session
        self._since: float | None = None  # since when the passes that are ready now wait for more
        self._idle_since: float | None = None  # since when the device has been idle during that wait
        self._ready = 0  # how many passes were ready when the wait began
        self._vain = 0  # waits in vain in a row
        self._skip = 0  # batches that do not wait

    # --- what happens -------------------------------------------------------------------------------------------------

    def arrived(self, session_id: str, tenant_id: str, cost: int, now: float) -> None:
        """Note that a pass has arrived."""
        if session_id not in self._sessions:
            self._forget_old(now)
        session = self._sessions.setdefault(session_id, _Session(tenant_id, cost, now))
        session.cost = cost
        session.arrive(now)

    def ended(self, session_id: str, now: float) -> None:
        """Note that a pass has ended, or was removed."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.passes = max(0, session.passes - 1)
            session.note(_Event.TRAINED, now)

    def sampling(self, session_id: str, now: float) -> None:
        """Note that a sample was accepted."""
        session = self._sessions.get(session_id)
        if session is None:
            self._strangers[session_id] += 1
            return
        if not session.samples:
            session.note(_Event.SAMPLES, now)
        session.samples += 1

    def sampled(self, session_id: str, now: float) -> None:
        """Note that a sample has ended, or was cancelled."""
        session = self._sessions.get(session_id)
        if self._strangers[session_id]:
            self._strangers[session_id] -= 1
            self._strangers = +self._strangers
        elif session is not None and session.samples:
            session.samples -= 1
            if not session.samples:
                session.note(_Event.SAMPLED, now)

    def started(self, now: float) -> None:
        """Note that a batch of passes starts, with all passes that are ready and fit."""
        self._since = self._idle_since = None
        self._skip = max(0, self._skip - 1)
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        for name in [name for name, session in self._sessions.items() if now - session.seen_at > _REMEMBERED]:
            del self._sessions[name]

    # --- the decision -------------------------------------------------------------------------------------------------

    def wait_until(self, ready: ReadyPasses, now: float, *, sampling: bool) -> float | None:
        """Return until when the ready passes wait for more, unless more come before; None: they start now.

        ``sampling``: whether samples use the device meanwhile.
        """
        if self._skip or not self._has_company():
            return None
        fixed, token = self.times.estimate()
        if not _pays(fixed, token, ready.cost / max(1, len(ready.sessions))):
            return None
        others, since = self._others(ready), now if self._since is None else self._since
        deadline = since + LONGEST
        if sampling:  # the wait costs the device nothing: it may take as long as the batch itself
            coming = sum(each.cost for each in others if each.expected(now, deadline) is not None)
            deadline = min(deadline, since + fixed + token * (ready.cost + min(ready.room, coming)))
            self._idle_since = None
        else:
            self._idle_since = now if self._idle_since is None else self._idle_since
            deadline = min(deadline, self._idle_since + fixed)
        expected = [latest for each in others if (latest := each.expected(now, deadline)) is not None]
        if not expected or now >= deadline:
            self._judge(ready)
            return None
        if self._since is None:
            self._since, self._ready = now, len(ready.sessions)
        return min(deadline, max(expected))

    def more_come(self, ready: ReadyPasses, now: float) -> bool:
        """Return whether passes of further sessions are expected within ``LONGEST`` seconds."""
        return self._has_company() and any(
            each.expected(now, now + LONGEST) is not None for each in self._others(ready)
        )

    def patience(self) -> float:
        """Return how many seconds of their share samples are put off while training has work; 0: they are not."""
        active = [session for session in self._sessions.values() if session.passes or session.samples]
        if self._strangers or not active or not all(session.samples_too for session in active):
            return 0.0
        if not self._has_company() or not _pays(*self.times.estimate(), max(session.cost for session in active)):
            return 0.0
        return min(LONGEST, _PUT_OFF * min(session.round for session in active))

    def _has_company(self) -> bool:
        """Return whether several tenants train: one alone never waits, not even for its own passes."""
        return len({session.tenant_id for session in self._sessions.values()}) > 1

    def _others(self, ready: ReadyPasses) -> list[_Session]:
        """Return the sessions that have no pass among the ready ones and whose next pass fits beside them."""
        others = (each for name, each in self._sessions.items() if name not in ready.sessions)
        return [each for each in others if each.cost <= ready.room]

    def _judge(self, ready: ReadyPasses) -> None:
        """End a wait. If no pass arrived in it, let some batches start without a wait: more after each such wait."""
        if self._since is None:
            return
        self._vain = 0 if len(ready.sessions) > self._ready else self._vain + 1
        self._skip = min(_MOST_SKIPPED, 2**self._vain) if self._vain else 0
        self._since = self._idle_since = None


def _pays(fixed: float, token: float, cost: float) -> bool:
    """Return whether the fixed seconds of a batch are a considerable part of the time of one pass of this cost."""
    return fixed > _LEAST_FIXED * (fixed + token * cost)
