"""The one thread that owns the model. Training and sampling take it in turns, one piece of work each.

Methods that belong to this thread are marked with :func:`compute_thread`, synchronous ones that belong to the event
loop with :func:`event_loop`. With TWINKLE_CHECK_THREADS, which our tests set, both assert it; else they do nothing.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from twinkle.environment import checks_threads

T = TypeVar("T")
P = ParamSpec("P")


class _ThisThread(threading.local):
    computes = False


_this_thread = _ThisThread()


def compute_thread(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that is called in the compute thread, or in a program without an event loop."""
    return _checked(method, "the compute thread", lambda: _this_thread.computes or asyncio._get_running_loop() is None)


def event_loop(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that is called on the event loop, whose state it changes."""
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
    """Whose work it is. Work of one lane runs in the order in which it came."""

    TRAINING = auto()  # batches, saves, loads and snapshots
    SAMPLING = auto()


class Compute:
    """Runs blocking work off the event loop, one piece at a time.

    While both lanes have work they alternate: a long rollout keeps an optimizer step waiting for one turn of the
    sampler, and however many batches and saves wait, sampling goes on after the next of them.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "compute", initializer=_begin_computing)
        self._lanes: dict[Lane, deque[tuple[Callable[[], Any], Future[Any]]]] = {lane: deque() for lane in Lane}
        self._next_lane = Lane.TRAINING  # of the compute thread
        self._step_began: float | None = None  # written by the compute thread, read by others
        self._work_came = threading.Event()

    async def run(self, work: Callable[[], T], lane: Lane = Lane.TRAINING) -> T:
        done: Future[T] = Future()
        self._lanes[lane].append((work, done))
        self._work_came.set()
        self._executor.submit(self._run_one)  # one call a piece; which piece is decided when the thread is free
        return await asyncio.wrap_future(done)

    @property
    def step_seconds(self) -> float:
        """Return for how long the present piece of work has run; 0 if none runs. Does not wait for the thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @compute_thread
    def run_waiting(self, lane: Lane, patience: float = 0.0) -> float:
        """Run the next piece of work of a lane in the middle of the present one. Returns the seconds it took.

        ``patience``: how many seconds to wait for such a piece.
        """
        until = time.monotonic() + patience
        while not self._lanes[lane]:
            self._work_came.clear()
            if not self._lanes[lane] and not self._work_came.wait(max(0.0, until - time.monotonic())):
                return 0.0
        began, started = self._step_began, time.monotonic()
        self._run_next(lane)
        seconds = time.monotonic() - started
        self._step_began = None if began is None else began + seconds
        return seconds

    def close(self) -> None:
        self._executor.shutdown(wait=True)

    def _run_one(self) -> None:
        lane = self._next_lane if self._lanes[self._next_lane] else _other(self._next_lane)
        if self._lanes[lane]:  # else it ran in the middle of another piece
            self._next_lane = _other(lane)
            self._run_next(lane)

    def _run_next(self, lane: Lane) -> None:
        work, done = self._lanes[lane].popleft()
        if not done.set_running_or_notify_cancel():
            return
        self._step_began = time.monotonic()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            self._step_began = None
            done.set_exception(error)
        else:
            self._step_began = None
            done.set_result(result)


def _other(lane: Lane) -> Lane:
    return Lane.SAMPLING if lane is Lane.TRAINING else Lane.TRAINING
