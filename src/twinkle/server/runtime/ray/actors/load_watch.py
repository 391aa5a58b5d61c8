"""Find a rank that hangs while the model of its group is loaded.

While a rank loads, a thread of it reports to the group's :class:`LoadBoard`, an actor of its own, because the actor of
a rank answers no call while it loads. The replica reads the board. Ranks wait for each other while they load, so a rank
that stands still may be healthy; loading has failed if no rank gets further any more. A rank that does not even report
is stopped, or its machine is gone, so it is not waited for any longer than that.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import twinkle
from twinkle.utils.progress import Activity

REPORT_SECONDS = 2.0  # how often a rank reports
_FEW_REPORTS = 5  # of them do not come if a process is stopped
_OWN_FILES = Path(twinkle.__file__).parent
_WAITS_IN = "distributed_c10d.py"  # torch's file in which a rank waits for the others


@dataclass(frozen=True)
class LoadReport:
    """What a rank that loads says about itself.

    ``number``: of the report. ``changes``: how often the rank has got further, also by importing a module. ``doing``:
    what it does, and how far it is. ``line``: the innermost line of Twinkle in which it is. ``waits``: whether it waits
    for other ranks there.
    """

    number: int
    changes: int
    doing: str
    line: str
    waits: bool

    def got_further(self, before: "LoadReport") -> bool:
        return (self.changes, self.doing) != (before.changes, before.doing)

    def __str__(self) -> str:
        return f"{self.doing} (at {self.line}{', waiting for other ranks' if self.waits else ''})"


class LoadBoard:
    """The actor to which the ranks of a group report while they load."""

    def __init__(self) -> None:
        self._reports: dict[int, LoadReport] = {}

    def put(self, rank: int, report: LoadReport) -> None:
        self._reports[rank] = report

    def reports(self) -> Mapping[int, LoadReport]:
        """Return the last report of each rank that has reported."""
        return self._reports


@dataclass(frozen=True)
class LoadReporter:
    """Reports what a rank does to the board of its group."""

    board: Any
    rank: int
    seconds: float = REPORT_SECONDS

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report, in a thread, what the thread that calls this does inside the context."""
        ended, loading = threading.Event(), threading.get_ident()

        def report() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                line, waits = _place(loading)
                changes = activity.changes + len(sys.modules)  # importing torch takes minutes on a busy machine
                self.board.put.remote(self.rank, LoadReport(number, changes, activity.text(), line, waits))
                ended.wait(self.seconds)

        with Activity() as activity:
            reporter = threading.Thread(target=report, name="report on loading", daemon=True)
            reporter.start()
            try:
                yield
            finally:
                ended.set()
                reporter.join()


def _place(thread: int) -> tuple[str, bool]:
    """Return the innermost line of Twinkle's code in which a thread is, and whether it waits for other ranks there."""
    frame, waits = sys._current_frames().get(thread), False
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        waits = waits or file.name == _WAITS_IN
        if file.is_relative_to(_OWN_FILES):
            return f"{file.relative_to(_OWN_FILES)}:{frame.f_lineno}", waits
        frame = frame.f_back
    return "unknown", waits


@dataclass(frozen=True)
class HungRank:
    """A rank that hangs while it loads, and why that is known."""

    rank: int
    why: str


class LoadWatch:
    """Knows for how long the ranks of a group have reported nothing, or nothing new. Nothing here calls Ray."""

    def __init__(self, limit: float, *, progress_counts: bool) -> None:
        """``limit``: in seconds. ``progress_counts``: whether ranks must get further, too, not only report."""
        self.reports: dict[int, LoadReport] = {}
        self._limit = limit
        self._progress_counts = progress_counts
        self._loading: list[int] = []
        self._silent: dict[int, float] = {}  # seconds without a report, by rank
        self._still: dict[int, float] = {}  # seconds in which it got no further, by rank
        self._all_still = 0.0  # seconds in which no rank got further or ended

    def look(self, reports: Mapping[int, LoadReport], loading: Iterable[int], seconds: float) -> HungRank | None:
        """Return a rank that hangs, if one does. ``seconds``: since the last look. ``loading``: ranks that still do."""
        before, self._loading = self._loading, sorted(loading)
        further = self._loading != before
        for rank in self._loading:
            last, now = self.reports.get(rank), reports.get(rank)
            if now is None or (last is not None and now.number == last.number):
                self._silent[rank] = self._silent.get(rank, 0.0) + seconds
            else:
                self._silent[rank] = 0.0
            if now is None or (last is not None and not now.got_further(last)):
                self._still[rank] = self._still.get(rank, 0.0) + seconds
            else:
                self._still[rank], further = 0.0, True
        self._all_still = 0.0 if further else self._all_still + seconds
        self.reports.update(reports)
        return self._hung() if self._loading else None

    def slowest(self, count: int) -> list[int]:
        """Return the ranks that still load, and have got no further for the longest time."""
        return sorted(self._loading, key=lambda rank: -self._still[rank])[:count]

    def _hung(self) -> HungRank | None:
        silent = max(self._loading, key=lambda rank: self._silent[rank])
        if self._silent[silent] >= self._limit:
            last = f"; before, it said: {self.reports[silent]}" if silent in self.reports else ""
            return HungRank(silent, f"it has given no sign of life for {self._silent[silent]:.0f} s{last}")
        if not self._progress_counts or self._all_still < self._limit:
            return None
        rank = max(self._loading, key=self._suspicion)
        still = f"it has got no further for {self._still[rank]:.0f} s, and no other rank has lately"
        return HungRank(rank, f"{still}; it says: {self.reports.get(rank, 'nothing')}")

    def _suspicion(self, rank: int) -> tuple[bool, bool, float]:
        """Return what is greatest for the rank for which the others wait."""
        report = self.reports.get(rank)
        is_silent = self._silent[rank] > _FEW_REPORTS * REPORT_SECONDS
        return is_silent, report is None or not report.waits, self._still[rank]
