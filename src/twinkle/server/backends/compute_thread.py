"""The compute thread: the one thread that owns the model. Training and sampling take turns, one piece of work each.

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

T = TypeVar("T")
P = ParamSpec("P")

_SOON = 0.02  # seconds to wait for an announced optimizer step: the event loop needs less to send it
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


@dataclass(frozen=True)
class _Piece:
    work: Callable[[], Any]
    done: Future[Any]
    shares: Mapping[str, float]
    step_follows: Callable[[Any], bool]


class Compute:
    """Runs blocking work in the compute thread, off the event loop, one piece at a time.

    While training and sampling both have work they alternate: during a long rollout a pass waits for one turn of the
    sampler only, and sampling waits for one batch or save only, however many are queued. An optimizer step goes before
    both, but while other work waits no two turns in a row are optimizer steps. If the caller says that a step follows a
    pass, pass and step are one turn.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "compute", initializer=_begin_computing)
        self._lanes: dict[Lane, deque[_Piece]] = {lane: deque() for lane in Lane}
        self._order = list(Lane)  # lanes, the one whose turn is next first; belongs to the compute thread
        self._step_began: float | None = None  # written by the compute thread, read by others
        self._work_came = threading.Event()

    async def run(
        self,
        work: Callable[[], T],
        lane: Lane = Lane.TRAINING,
        shares: Mapping[str, float] = NOBODY,
        *,
        step_follows: Callable[[T], bool] = lambda _result: False,
    ) -> T:
        """Run ``work`` in the compute thread when its turn comes, and return its result. Called on the event loop.

        ``shares``: the tenants for which the work is done, and the fraction for each. ``step_follows`` is called with
        the result: if it returns True, the caller will submit an optimizer step as soon as it has the result. The
        compute thread then waits a moment for that step, and runs it in the same turn.
        """
        done: Future[T] = Future()
        self._lanes[lane].append(_Piece(work, done, shares, step_follows))
        self._work_came.set()
        self._executor.submit(self._run_one)  # one call for each piece; the thread picks the piece when it is free
        return await asyncio.wrap_future(done)

    @property
    def step_seconds(self) -> float:
        """Return for how long the present piece of work has run; 0 if none runs. Does not wait for the thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @compute_thread
    def run_waiting(self, lane: Lane) -> Mapping[str, float]:
        """Run the next piece of work of a lane, if there is one, in the middle of the present piece.

        Return the seconds that it took, divided among its tenants; nothing if there was no work. They do not count as
        time of the present piece.
        """
        if not self._lanes[lane]:
            return {}
        began, started = self._step_began, time.monotonic()
        shares = self._run_next(lane)
        seconds = time.monotonic() - started
        self._step_began = None if began is None else began + seconds
        return {tenant_id: seconds * share for tenant_id, share in shares.items()}

    def close(self) -> None:
        self._executor.shutdown(wait=True)

    def _run_one(self) -> None:
        lane = next((lane for lane in self._order if self._lanes[lane]), None)
        if lane is None:  # the piece for this call already ran in the middle of another one
            return
        self._order.remove(lane)
        self._order.append(lane)
        if lane is not Lane.STEPS:  # after other work, optimizer steps go first again
            self._order.remove(Lane.STEPS)
            self._order.insert(0, Lane.STEPS)
        self._run_next(lane)

    def _run_next(self, lane: Lane) -> Mapping[str, float]:
        piece = self._lanes[lane].popleft()
        if not piece.done.set_running_or_notify_cancel():
            return piece.shares
        self._step_began = time.monotonic()
        try:
            result = piece.work()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            self._step_began = None
            piece.done.set_exception(error)
        else:
            self._step_began = None
            piece.done.set_result(result)
            if piece.step_follows(result) and self._step_comes():
                self._run_next(Lane.STEPS)
        return piece.shares

    def _step_comes(self) -> bool:
        """Wait up to ``_SOON`` seconds for an optimizer step, and return whether one was submitted."""
        until = time.monotonic() + _SOON
        while not self._lanes[Lane.STEPS]:
            self._work_came.clear()
            if not self._lanes[Lane.STEPS] and not self._work_came.wait(max(0.0, until - time.monotonic())):
                return False
        return True
