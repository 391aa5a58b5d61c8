"""The compute thread: the one thread that owns the model. Training and sampling take turns; each has its share of time.

Methods that belong to this thread are marked with :func:`compute_thread`, synchronous methods that belong to the event
loop with :func:`event_loop`. With TWINKLE_CHECK_THREADS, which our tests set, a call in the wrong one of these two
fails an assertion; otherwise the marks have no effect.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from twinkle.environment import checks_threads
from twinkle.server.backends.device_share import DeviceShare
from twinkle.server.config.applications import DEFAULT_SAMPLING_SHARE

T = TypeVar("T")
P = ParamSpec("P")

_SOON = 0.02  # seconds to wait for announced work: the event loop needs less to send it
_SHORTEST_TURN = 0.001  # seconds; turns of a sampler that makes no progress count, too, or training would never run
NOBODY: Mapping[str, float] = {"": 1.0}  # the shares of work that is not done for particular tenants


class _ThisThread(threading.local):
    computes = False


_this_thread = _ThisThread()


def compute_thread(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that is called in the compute thread, or in a thread where no event loop runs."""
    return _checked(method, "the compute thread", lambda: _this_thread.computes or asyncio._get_running_loop() is None)


def event_loop(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that must be called on the event loop, because it changes state that belongs to it."""
    return _checked(method, "the event loop", lambda: not _this_thread.computes)


def _checked(method: Callable[P, T], owner: str, is_there: Callable[[], bool]) -> Callable[P, T]:
    if not checks_threads():
        return method

    @wraps(method)
    def checked(*arguments: P.args, **options: P.kwargs) -> T:
        assert is_there(), f"{method.__qualname__} belongs to {owner}"
        return method(*arguments, **options)

    return checked


def _begin_computing() -> None:
    _this_thread.computes = True


class Lane(Enum):
    """The kinds of work of the compute thread. Work of one lane runs in the order in which it was submitted."""

    STEPS = auto()  # optimizer steps: they are short, and the client that trains waits for them
    TRAINING = auto()  # batches of passes, saves, loads and snapshots
    SAMPLING = auto()


@dataclass(eq=False)
class _Piece:
    work: Callable[[], Any]
    done: Future[Any]
    shares: Mapping[str, float]
    follows: Callable[[Any], Lane | None]
    repeats: Callable[[Any], bool]
    submitted_at: float
    begun: bool = False

    def may_run(self) -> bool:
        """Return False if the piece was cancelled before its first turn; after that it cannot be cancelled."""
        self.begun = self.begun or self.done.set_running_or_notify_cancel()
        return self.begun


class Compute:
    """Runs blocking work in the compute thread, off the event loop, one piece at a time.

    While training and sampling both have work, sampling gets ``sampling_share`` of the time
    (:class:`~twinkle.server.backends.device_share.DeviceShare`): between pieces of training and, where a piece offers
    it by :meth:`let_sampling_run`, in the middle of one. An optimizer step goes before both, but while other work waits
    no two turns in a row are optimizer steps. If the caller says that a step follows a pass, pass and step are one
    turn.

    The sampler's work is a piece that repeats: as soon as a turn has ended, the next one is in the queue. It does not
    wait for the event loop. Other work may run between two turns.
    """

    def __init__(
        self, sampling_share: float = DEFAULT_SAMPLING_SHARE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = ThreadPoolExecutor(1, "compute", initializer=_begin_computing)
        self._lanes: dict[Lane, deque[_Piece]] = {lane: deque() for lane in Lane}
        self._clock = clock
        self._step_began: float | None = None  # written by the compute thread, read by others
        self._sampling = False  # a turn of sampling runs now; written by the compute thread, read by others
        self._work_came = threading.Event()
        self._running = threading.Lock()  # held to change ``_runs``, and to find that there is no more work
        self._runs = False  # the thread runs pieces, or is about to begin
        self._closing = False
        # State of the compute thread:
        self._share = DeviceShare(sampling_share)
        self._stepped_last = False  # the last turn was an optimizer step
        self._turn_began: float | None = None  # when the present turn of sampling began, if it can be ended early
        self._counted_until = 0.0  # the time up to which ``_share`` knows who computed
        self._sampled_within = 0.0  # seconds of sampling in the middle of pieces of training

    async def run(
        self,
        work: Callable[[], T],
        lane: Lane = Lane.TRAINING,
        shares: Mapping[str, float] = NOBODY,
        *,
        follows: Callable[[T], Lane | None] = lambda _result: None,
        repeats: Callable[[T], bool] = lambda _result: False,
    ) -> T:
        """Run ``work`` in the compute thread when its turn comes, and return its result. Called on the event loop.

        ``shares``: the tenants for which the work is done, and the fraction for each. ``follows`` is called with the
        result: if it returns a lane, the caller will submit work of that lane as soon as it has the result. The compute
        thread then waits a moment for that work, and runs it in the same turn. ``repeats`` is called with the result,
        too: while it returns True, the work runs again, as a further turn; the last result is returned.
        """
        if self._closing:
            raise RuntimeError("the compute thread is closed")
        done: Future[T] = Future()
        self._lanes[lane].append(_Piece(work, done, shares, follows, repeats, self._clock()))
        self._work_came.set()
        with self._running:
            if not self._runs:
                self._executor.submit(self._run_all)
                self._runs = True
        return await asyncio.wrap_future(done)

    async def training_turn(self) -> None:
        """Wait until training may compute. The compute thread then waits a moment for the work of the caller.

        So the caller can decide as late as possible what to compute.
        """
        await self.run(lambda: None, follows=lambda _result: Lane.TRAINING)

    def put_off_sampling(self, patience: float) -> None:
        """Let sampling wait, while training has work, until so many seconds of its share are due. 0: it does not wait.

        Sampling still gets its share of the time.
        """
        self._share.patience = patience

    @property
    def samples(self) -> bool:
        """Return whether sampling has a turn to run, or runs one now, so that the device is not idle."""
        return bool(self._lanes[Lane.SAMPLING]) or self._sampling

    @property
    def step_seconds(self) -> float:
        """Return for how long the present piece of work has run; 0 if none runs. Does not wait for the thread."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    @compute_thread
    def training_is_next(self) -> bool:
        """Return whether training waits and will compute next. The sampler asks it in the middle of a turn.

        If so, the sampler ends its turn, so that samples of other tenants come sooner and decode together with its own.
        While sampling has not used its share, training does not compute next. A turn in the middle of a piece of
        training ends when the sampler likes.
        """
        if self._turn_began is None:
            return False
        if self._lanes[Lane.STEPS]:
            return True
        training = self._lanes[Lane.TRAINING]
        return bool(training) and not self._share.is_due_after(
            self._turn_began, self._clock(), training[0].submitted_at
        )

    @compute_thread
    def training_clock(self) -> float:
        """Return the time in seconds on a clock that stands still while sampling runs in the middle of a piece."""
        return self._clock() - self._sampled_within

    @compute_thread
    def run_waiting(self, lane: Lane) -> Mapping[str, float]:
        """Run the next piece of training or the next optimizer step, if there is one, in the middle of the present
        piece of training.

        Return the seconds that it took, divided among its tenants; nothing if there was no work. They do not count as
        time of the present piece.
        """
        if not self._lanes[lane]:
            return {}
        began, started, own = self._step_began, self._clock(), self.training_clock()
        shares = self._run_next(lane)
        self._step_began = None if began is None else began + self._clock() - started
        seconds = self.training_clock() - own
        return {tenant_id: seconds * share for tenant_id, share in shares.items()}

    @compute_thread
    def let_sampling_run(self) -> None:
        """Let the sampler take turns in the middle of the present piece of training, until it has had its share.

        Its errors reach the caller that submitted its turns, not the present piece.
        """
        began, started = self._step_began, self._clock()
        self._count_training(started)
        while self._share.sampling_is_due and self._lanes[Lane.SAMPLING]:
            self._run_next(Lane.SAMPLING, within=True)
        seconds = self._clock() - started
        self._sampled_within += seconds
        self._step_began = None if began is None else began + seconds

    def close(self) -> None:
        """Run what was submitted, a piece that repeats once more, and end the thread."""
        self._closing = True
        self._executor.shutdown(wait=True)

    def _run_all(self) -> None:
        """Run pieces, each when its turn comes, until there are none."""
        while True:
            lane = self._next_lane()
            if lane is None:
                with self._running:  # work that comes later finds that the thread does not run
                    if not any(self._lanes.values()):
                        self._runs = False
                        return
                continue
            self._stepped_last = lane is Lane.STEPS
            self._counted_until = self._clock()
            self._run_next(lane)

    def _next_lane(self) -> Lane | None:
        """Return the lane whose turn it is; None if there is no work."""
        steps, training, sampling = (bool(self._lanes[lane]) for lane in Lane)
        if steps and not (self._stepped_last and (training or sampling)):
            return Lane.STEPS
        if training and not (sampling and self._share.sampling_is_due):
            return Lane.TRAINING
        return Lane.SAMPLING if sampling else None

    def _run_next(self, lane: Lane, *, within: bool = False) -> Mapping[str, float]:
        """Run the next piece of a lane. ``within``: in the middle of a piece of training."""
        piece = self._lanes[lane].popleft()
        if not piece.may_run():
            return piece.shares
        self._step_began = started = self._clock()
        self._sampling = lane is Lane.SAMPLING
        self._turn_began = started if self._sampling and not within else None
        try:
            try:
                result = piece.work()
                repeats = piece.repeats(result) and not self._closing
                following = None if repeats else piece.follows(result)
            finally:
                self._end(lane, started, within=within)
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            piece.done.set_exception(error)
            return piece.shares
        if repeats:
            piece.submitted_at = self._clock()
            self._lanes[lane].append(piece)
            return piece.shares
        piece.done.set_result(result)
        if following is not None and self._comes(following):
            self._run_next(Lane.STEPS if self._lanes[Lane.STEPS] else following)
        return piece.shares

    def _end(self, lane: Lane, started: float, *, within: bool) -> None:
        """Count the time of a piece that has just ended."""
        self._step_began, self._sampling = None, False
        now = self._clock()
        if lane is not Lane.SAMPLING:
            self._count_training(now)
            return
        started = min(started, now - _SHORTEST_TURN)
        training_since: float | None
        if within:  # the time in which training waited for this turn counts, too
            started = training_since = min(started, self._counted_until)
        else:
            training = (self._lanes[lane] for lane in (Lane.STEPS, Lane.TRAINING))
            training_since = min((pieces[0].submitted_at for pieces in training if pieces), default=None)
        self._share.count_sampling(started, now, training_since)
        self._counted_until = now

    def _count_training(self, now: float) -> None:
        """Count the time since the last count, in which training computed."""
        sampling = self._lanes[Lane.SAMPLING]
        self._share.count_training(self._counted_until, now, sampling[0].submitted_at if sampling else None)
        self._counted_until = now

    def _comes(self, lane: Lane) -> bool:
        """Wait up to ``_SOON`` seconds for work in a lane, or for an optimizer step; return whether there is some."""
        until = time.monotonic() + _SOON
        while not (self._lanes[lane] or self._lanes[Lane.STEPS]):
            self._work_came.clear()
            came = bool(self._lanes[lane] or self._lanes[Lane.STEPS])
            if not came and not self._work_came.wait(max(0.0, until - time.monotonic())):
                return False
        return True
