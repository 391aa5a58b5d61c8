"""Lines about work that takes long: what it is, how far it is, and how long it has taken.

    with Progress("loading Qwen/Qwen3-4B") as progress:
        progress.doing("reading the weights")
        ...
        progress.reached(3, 8, "files")

The first line comes after five seconds, then one every ten seconds, and after the first minute one every minute. Short
work reports nothing. A line is text and not a bar, so that it can stand in a log file.

Another thread that wants to know whether the work still gets further asks an :class:`Activity` around it.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TypeVar

from twinkle.environment import read_environment

__all__ = ["FIRST_SECONDS", "NO_BARS", "Activity", "Progress"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Variables that keep the progress bars of Hugging Face's libraries, and of others that use tqdm, out of log files.
NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}

FIRST_SECONDS = 5.0
_PAUSES = ((60.0, 10.0), (float("inf"), 60.0))  # seconds so far, and the pause until the next line


class Activity:
    """Knows what the work inside its context does now, and how often it has got further.

    Each :class:`Progress` of the thread that entered the context tells it. Any thread may ask.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._running: tuple[Progress, ...] = ()  # the innermost is the last
        self._ended = ""  # the text of the last one that ended

    def __enter__(self) -> "Activity":
        self._token = _activity.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _activity.reset(self._token)

    def text(self) -> str:
        """Return what is being done, such as "loading m: 37 of 291 weights"."""
        running = self._running
        if running:
            return running[-1].text()
        return f"after {self._ended}" if self._ended else "nothing yet"

    def begin(self, progress: "Progress") -> None:
        self._running += (progress,)
        self.changes += 1

    def end(self, progress: "Progress") -> None:
        self._running = tuple(each for each in self._running if each is not progress)
        self._ended = progress.what
        self.changes += 1


_activity: ContextVar[Activity | None] = ContextVar("activity of this thread", default=None)


class Progress:
    """Reports on the work inside the context, in a thread of its own, so that the work may block.

    ``what`` names the work. ``report`` gets the lines; without it they are logged, or printed to stderr if the program
    has not set up logging. ``detail`` is called in the reporting thread for each line and says how far the work is.
    """

    def __init__(
        self,
        what: str,
        report: Callable[[str], None] | None = None,
        detail: Callable[[], str] | None = None,
        *,
        first_seconds: float | None = None,
    ) -> None:
        self.what = what
        self._report = report or _log
        self._detail = detail
        self._first = FIRST_SECONDS if first_seconds is None else first_seconds
        self._now = ""  # what is being done
        self._count = ""  # how far it is
        self._has_reported = self._is_given_up = False
        self._ended = threading.Event()
        self._activity: Activity | None = None
        self._thread = threading.Thread(target=self._run, name=f"progress of {what}", daemon=True)

    def __enter__(self) -> "Progress":
        self._began = time.monotonic()
        self._thread.start()
        self._activity = _activity.get()
        if self._activity is not None:
            self._activity.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._activity is not None:
            self._activity.end(self)
        if self._has_reported and kind is None and not self._is_given_up:
            self._report(f"{self.what}: done after {self._seconds:.0f} s")

    def doing(self, now: str) -> None:
        """Say which part of the work begins now."""
        self._now, self._count = now, ""
        self._note_change()

    def reached(self, done: float, total: float, unit: str) -> None:
        """Say how far the work is, such as 3 of 8 files."""
        self._count = f"{done:.0f} of {total:.0f} {unit}"
        self._note_change()

    def count(self, items: Iterable[T], unit: str, total: int | None = None) -> Iterator[T]:
        """Yield the items, and say after each how far the work is. ``total``: their number, if it is known."""
        for number, item in enumerate(items, 1):
            yield item
            if total is None:
                self._count = f"{number} {unit}"
                self._note_change()
            else:
                self.reached(number, total, unit)

    def give_up(self) -> None:
        """Say that the work will not be finished: then there is no line that it is done."""
        self._is_given_up = True

    def text(self) -> str:
        """Return what is being done and how far it is. May be called from any thread."""
        return f"{self.what}: {self._state()}"

    def _state(self) -> str:
        parts = [self._now, self._count, "" if self._detail is None else self._detail()]
        return ", ".join(part for part in parts if part) or "still working"

    def _note_change(self) -> None:
        if self._activity is not None:
            self._activity.changes += 1

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        wait = self._first
        while not self._ended.wait(wait):
            self._has_reported = True
            self._report(f"{self.text()} ({self._seconds:.0f} s so far)")
            wait = next(pause for limit, pause in _PAUSES if self._seconds < limit)


def _log(line: str) -> None:
    """Log a line, or print it if the program has not set up logging; of a machine's processes only the first prints."""
    if logger.hasHandlers():
        logger.info(line)
    elif read_environment().local_rank == 0:
        print(f"twinkle: {line}", file=sys.stderr, flush=True)
