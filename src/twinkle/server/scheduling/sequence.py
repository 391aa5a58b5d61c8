"""The ops of one adapter in order: sequence numbers, gaps, repeated requests, windows. Knows nothing of other adapters.

Order. An op starts when the ops with all lower numbers have ended; only consecutive passes of one kind may run in one
batch. An op that arrives before a lower number waits for it.

Gaps. A gap is a missing number with ops waiting behind it. Its age counts from the arrival of the oldest of these ops,
even if earlier ops of the adapter were still running then. A gap older than ``gap_timeout`` is given up as soon as no
op of the adapter runs: the ops behind it, up to the next gap, are refused, and the adapter continues after the last of
them. Example: 0 has run, 2, 3 and 5 wait, and 1 never arrives. Then 2 and 3 are refused, and the sequence continues
with 4, the next gap, which has an age of its own. Nobody knows what op the missing number was, so it counts as a failed
forward_backward.

Restarts. Numbers that ended before a restart and do not run again are skipped (:class:`Passed`). Numbers that the
replay of the journal will still submit are not gaps.

Windows. A window is the ops between two optim_steps, and it is atomic. A forward_backward that failed, whether it ran
or was refused, spoils its window: the optim_step that closes the window is refused, and the next window is clean. A
load that succeeds also starts a clean window, because it drops the gradient. A failed forward-only op does not spoil
the window, and all other ops in a spoilt window run. After a *refused* optim_step the caller always drops the gradient;
an optim_step that ran and failed changes nothing here. Where a client learns of a failed pass before it sends its next
request, it decides itself whether to step; for such runs ``failed_pass_spoils`` is False, and only a missing number
spoils a window.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum

from twinkle.server.types import Op, OpKind

_DROPPED = "the gradient since the last optim_step is dropped, send its forward_backward calls again"
_SPOILT = "the optim_step that follows will be refused, as the missing number may have been a forward_backward"

# A client repeats a request within the minutes for which it retries. Older repeats are recognised by the journal.
REMEMBERED_DIGESTS = 1024


# --- what ``submit`` returns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """The op is new. It will be in exactly one batch or one refusal, unless its adapter is removed before."""


@dataclass(frozen=True)
class Duplicate:
    """The request repeats one that waits, runs or has ended: it gets the answer of the first one."""


@dataclass(frozen=True)
class Conflict:
    """The number belongs to a request with another body. The first request is not affected."""

    message: str


@dataclass(frozen=True)
class TooLate:
    """The adapter is past this number, and the digest of its request is not remembered here.

    The op may have ended long ago or before a restart; then the journal has it. If the journal does not have it, the
    number was given up as missing, and ``message`` is the answer.
    """

    message: str


Submitted = Accepted | Duplicate | Conflict | TooLate


# --- ops that fail without running ------------------------------------------------------------------------------------


class RefusalReason(StrEnum):
    """Why an op fails without running: a number before it is missing, or it is a step whose window is spoilt."""

    GAP = "gap"  # an earlier number never arrived
    WINDOW = "window"  # an optim_step whose window has a failed forward_backward


@dataclass(frozen=True)
class Refusal:
    """An op that fails without running. ``message`` is for its client."""

    op: Op
    reason: RefusalReason
    message: str

    @property
    def drops_gradient(self) -> bool:
        """Return whether the adapter's accumulated gradient must be dropped before its next op runs."""
        return self.op.is_step


@dataclass(frozen=True)
class Passed:
    """A range of numbers that ended before a restart and do not run again.

    They were answered or, if ``given_up``, never arrived. ``last`` is included.
    """

    first: int
    last: int
    given_up: bool


@dataclass(frozen=True)
class Position:
    """How far an adapter is: all numbers up to and including ``seq`` have ended or were given up as missing.

    ``failed_seq`` is the number that spoilt the open window; None: the window is clean.
    """

    seq: int
    failed_seq: int | None


@dataclass(eq=False)
class OpSequence:
    """The ops of one adapter, from arrival to end. Times are seconds of a monotonic clock."""

    adapter_id: str
    gap_timeout: float
    failed_pass_spoils: bool  # whether a forward_backward that failed spoils its window
    next_seq: int  # the number of the next op to start
    failed_seq: int | None  # the number that spoilt the open window
    passed: deque[Passed]  # ranges to skip that are still ahead, in order
    owed: set[int]  # numbers that the replay of the journal will submit
    running: dict[int, Op] = field(default_factory=dict)
    # Waiting ops by number, in order of arrival, each with the time of its arrival.
    _waiting: OrderedDict[int, tuple[Op, float]] = field(default_factory=OrderedDict)
    _numbers: list[int] = field(default_factory=list)  # the keys of _waiting, as a heap
    _digests: dict[int, bytes] = field(default_factory=dict)  # of waiting and running ops, and of those in _ended
    _ended: deque[int] = field(default_factory=deque)  # the last REMEMBERED_DIGESTS numbers that ended

    def __post_init__(self) -> None:
        self._pass_over()

    def __len__(self) -> int:
        """Return how many ops wait."""
        return len(self._waiting)

    @property
    def position(self) -> Position | None:
        """Return how far the adapter is; None while an op runs, because its state may be half changed then."""
        return None if self.running else Position(self.next_seq - 1, self.failed_seq)

    @property
    def head(self) -> Op | None:
        """Return the next op in order; None if it has not arrived or must be refused.

        It may start when no op of an earlier batch runs.
        """
        if self.next_seq not in self._waiting:
            return None
        op, _ = self._waiting[self.next_seq]
        spoilt = self.failed_seq is not None and op.is_step
        return None if spoilt else op

    @property
    def refusal_time(self) -> float | None:
        """Return the time from which :meth:`refuse` will refuse an op; None if no op is to be refused at present."""
        if self.running or not self._waiting or self.head is not None:
            return None
        if self.next_seq in self._waiting:
            _, arrived = self._waiting[self.next_seq]
            return arrived
        if self.next_seq in self.owed:
            return None
        _, arrived = next(iter(self._waiting.values()))
        return arrived + self.gap_timeout

    def submit(self, op: Op, now: float) -> Submitted:
        """Add an op that arrived at ``now``, if its number is new."""
        known = self._digests.get(op.seq)
        if known is not None:
            used = f"sequence number {op.seq} of {self.adapter_id} was used by a request with another body"
            return Duplicate() if known == op.digest else Conflict(f"{used}: use a new number")
        if op.seq < self.next_seq or self._is_passed(op.seq):
            late = f"sequence number {op.seq} came too late"
            return TooLate(f"{late}: the next one of {self.adapter_id} is {self.next_seq}")
        self.owed.discard(op.seq)
        self._digests[op.seq] = op.digest
        self._waiting[op.seq] = (op, now)
        heapq.heappush(self._numbers, op.seq)
        return Accepted()

    def _is_passed(self, seq: int) -> bool:
        """Return whether a number will be skipped. Ops before it may still wait or run, as in a replay."""
        if not self.passed or seq > self.passed[-1].last or seq in self.owed:
            return False  # at once for new numbers: a replay may have thousands of ranges
        return any(each.first <= seq <= each.last for each in self.passed)

    def start(self) -> Op:
        """Take out the :attr:`head`, note that it runs, and return it."""
        op = self._take()
        self.running[op.seq] = op
        return op

    def finish(self, op: Op, failed: bool) -> None:
        del self.running[op.seq]
        self._end(op, failed)
        self._pass_over()

    def refuse(self, now: float) -> list[Refusal]:
        """Take out and return the ops that have to fail by ``now`` without running."""
        refusals: list[Refusal] = []
        while (due := self.refusal_time) is not None and due <= now:
            if self.next_seq in self._waiting:
                refusals.append(self._refuse(RefusalReason.WINDOW, self._window_message()))
            else:
                refusals += self._give_up_gap()
        return refusals

    def leave(self) -> list[Op]:
        """Take out all waiting ops and return them in the order of their numbers."""
        ops = [self._waiting[seq][0] for seq in sorted(self._numbers)]
        self._waiting.clear()
        self._numbers.clear()
        return ops

    def _give_up_gap(self) -> list[Refusal]:
        """Skip the missing numbers, and refuse the ops behind them up to the next gap."""
        last = min((self._numbers[0], *self.owed)) - 1
        message = self._gap_message(self.next_seq, last)
        self._spoil(self.next_seq)
        self.next_seq = last + 1
        refusals: list[Refusal] = []
        while self.next_seq in self._waiting:
            closes = self._waiting[self.next_seq][0].is_step
            refusals.append(self._refuse(RefusalReason.GAP, f"{message}; {_DROPPED if closes else _SPOILT}"))
        return refusals

    def _refuse(self, reason: RefusalReason, message: str) -> Refusal:
        op = self._take()
        self._end(op, failed=True)
        if op.is_step:
            self.failed_seq = None
        self._pass_over()
        return Refusal(op, reason, message)

    def _take(self) -> Op:
        seq = heapq.heappop(self._numbers)
        assert seq == self.next_seq, f"{self.adapter_id}: took {seq}, expected {self.next_seq}"
        self.next_seq += 1
        op, _ = self._waiting.pop(seq)
        return op

    def _pass_over(self) -> None:
        """Skip numbers that ended before a restart, once all lower numbers have ended."""
        while self.passed and self.passed[0].first <= self.next_seq and not self.running:
            passed = self.passed.popleft()
            if passed.given_up:
                self._spoil(passed.first)
            self.next_seq = max(self.next_seq, passed.last + 1)

    def _end(self, op: Op, failed: bool) -> None:
        if failed and op.kind is OpKind.FORWARD_BACKWARD and self.failed_pass_spoils:
            self._spoil(op.seq)
        if not failed and op.kind is OpKind.LOAD:
            self.failed_seq = None
        self._ended.append(op.seq)
        if len(self._ended) > REMEMBERED_DIGESTS:
            del self._digests[self._ended.popleft()]

    def _spoil(self, seq: int) -> None:
        """Note that a number spoilt the window. Errors name the lowest such number; ops of one batch may finish in any
        order.
        """
        self.failed_seq = seq if self.failed_seq is None else min(seq, self.failed_seq)

    def _window_message(self) -> str:
        return (
            f"optim_step {self.next_seq} was not applied: forward_backward {self.failed_seq} before it failed "
            f"or never arrived; {_DROPPED}"
        )

    def _gap_message(self, first: int, last: int) -> str:
        missing = f"number {first}" if first == last else f"numbers {first} to {last}"
        return f"sequence {missing} did not arrive within {self.gap_timeout:g} s, and this request had to follow"
