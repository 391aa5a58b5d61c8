"""One adapter's ops in order: sequence numbers, gaps, repeated requests, windows. Knows nothing of other adapters.

Order. An op runs when all numbers before it have ended; any later number may arrive first and waits.

Gaps. A gap is a missing number with ops waiting behind it. Its age counts from the arrival of the oldest of those,
however long earlier ops of the adapter ran meanwhile. A gap that is too old is given up once nothing of the adapter
runs: the ops waiting behind it, up to the next gap, are refused, and the adapter goes on after the last of them. What
the missing number would have been is unknown, so it counts as a failed forward_backward. The next gap has its own age.

Restarts. Numbers that ended before a restart and need not run again are passed over (:class:`Passed`); numbers that
the replay of the journal will still bring are no gap.

Windows. A window is what lies between two optim_steps, and it is atomic. A forward_backward that failed, ran or not,
spoils it; then the optim_step that closes it is refused and the next window is clean. A load that succeeds starts a
clean window too, for it drops the gradient. Forward-only ops spoil nothing, and everything else in a spoilt window
runs. A *refused* optim_step always ends with the gradient dropped, by the caller; one that ran and failed changed
nothing here. Where a client hears of a failed pass before it sends the next request, it decides for itself: there only
a missing number spoils a window (``failed_pass_spoils``).
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum

from twinkle.server.types import Op, OpKind

_DROPPED = "the gradient since the last optim_step is dropped, send its forward_backward calls again"
_SPOILT = "the optim_step that follows will be refused, as the missing number may have been a forward_backward"

# Reposts come within the minutes that a client retries, and the journal knows all older ones.
REMEMBERED_DIGESTS = 1024


# --- what submitting an op may end in ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """New: it will be in one batch or in one refusal."""


@dataclass(frozen=True)
class Duplicate:
    """The same request again, waiting, running or ended: the answer is that of the first."""


@dataclass(frozen=True)
class Conflict:
    """The number belongs to a request with another body, which this one does not disturb."""

    message: str


@dataclass(frozen=True)
class TooLate:
    """The adapter is past this number and no body is remembered for it.

    The op may have ended long ago or before a restart: the journal knows. If it does not, the number was given up as
    missing and ``message`` is the answer.
    """

    message: str


Submitted = Accepted | Duplicate | Conflict | TooLate


# --- what fails without running ---------------------------------------------------------------------------------------


class RefusalReason(StrEnum):
    GAP = "gap"  # an earlier number never came
    WINDOW = "window"  # an optim_step whose window has a failed forward_backward


@dataclass(frozen=True)
class Refusal:
    op: Op
    reason: RefusalReason
    message: str

    @property
    def drops_gradient(self) -> bool:
        """Return whether the adapter's accumulated gradient must be dropped before its next op runs."""
        return self.op.is_step


@dataclass(frozen=True)
class Passed:
    """Numbers that ended before a restart and are not run again: answered, or ``given_up`` as missing."""

    first: int
    last: int
    given_up: bool


@dataclass(frozen=True)
class Position:
    """Where an adapter stands: all numbers up to and including ``seq`` have ended; ``failed_seq`` spoilt the window."""

    seq: int
    failed_seq: int | None


@dataclass(eq=False)
class OpSequence:
    """The ops of one adapter, from arrival to end. Times are seconds on any clock that never goes back."""

    adapter_id: str
    gap_timeout: float
    failed_pass_spoils: bool  # whether a forward_backward that failed spoils its window
    next_seq: int  # the next to start
    failed_seq: int | None
    passed: deque[Passed]  # what is still ahead of it, in order
    owed: set[int]  # numbers that a replay of the journal will bring
    running: dict[int, Op] = field(default_factory=dict)
    _waiting: OrderedDict[int, tuple[Op, float]] = field(default_factory=OrderedDict)  # by arrival, with its time
    _numbers: list[int] = field(default_factory=list)  # a heap of those waiting
    _digests: dict[int, bytes] = field(default_factory=dict)
    _ended: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._pass_over()

    def __len__(self) -> int:
        """Return how many ops wait."""
        return len(self._waiting)

    @property
    def position(self) -> Position | None:
        """Return where the adapter stands; None while an op runs, when it is between two states."""
        return None if self.running else Position(self.next_seq - 1, self.failed_seq)

    @property
    def head(self) -> Op | None:
        """Return the next op, if it is here and may run as soon as nothing runs."""
        if self.next_seq not in self._waiting:
            return None
        op, _ = self._waiting[self.next_seq]
        spoilt = self.failed_seq is not None and op.is_step
        return None if spoilt else op

    @property
    def refusal_time(self) -> float | None:
        """Return the time from which on :meth:`refuse` has something; None if, as things stand, it never will."""
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
        known = self._digests.get(op.seq)
        if known is not None:
            used = f"sequence number {op.seq} of {self.adapter_id} was used by a request with another body"
            return Duplicate() if known == op.digest else Conflict(f"{used}: use a new number")
        if op.seq < self.next_seq:
            late = f"sequence number {op.seq} came too late"
            return TooLate(f"{late}: the next one of {self.adapter_id} is {self.next_seq}")
        self.owed.discard(op.seq)
        self._digests[op.seq] = op.digest
        self._waiting[op.seq] = (op, now)
        heapq.heappush(self._numbers, op.seq)
        return Accepted()

    def start(self) -> Op:
        """Take the head out to run it."""
        op = self._take()
        self.running[op.seq] = op
        return op

    def finish(self, op: Op, failed: bool) -> None:
        del self.running[op.seq]
        self._end(op, failed)
        self._pass_over()

    def refuse(self, now: float) -> list[Refusal]:
        """Take out all that must fail by now without running."""
        refusals: list[Refusal] = []
        while (due := self.refusal_time) is not None and due <= now:
            if self.next_seq in self._waiting:
                refusals.append(self._refuse(RefusalReason.WINDOW, self._window_message()))
            else:
                refusals += self._give_up_gap()
        return refusals

    def leave(self) -> list[Op]:
        """Take out all that waits."""
        ops = [self._waiting[seq][0] for seq in sorted(self._numbers)]
        self._waiting.clear()
        self._numbers.clear()
        return ops

    def _give_up_gap(self) -> list[Refusal]:
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
        """Go past numbers that ended before a restart, once all before them have ended."""
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
        """The first failure of a window is the one to name; ops of one batch may finish in any order."""
        self.failed_seq = seq if self.failed_seq is None else min(seq, self.failed_seq)

    def _window_message(self) -> str:
        return (
            f"optim_step {self.next_seq} was not applied: forward_backward {self.failed_seq} before it failed "
            f"or never arrived; {_DROPPED}"
        )

    def _gap_message(self, first: int, last: int) -> str:
        missing = f"number {first}" if first == last else f"numbers {first} to {last}"
        return f"sequence {missing} did not arrive within {self.gap_timeout:g} s, and this request had to follow"
