"""Progress lines: none for short work; for long work what it is, how far it is, and how long it has taken."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from twinkle.utils import progress
from twinkle.utils.progress import Activity, Progress


class Lines(list[str]):
    """Collects lines, and lets a test wait for the next one."""

    def __init__(self) -> None:
        self._came = threading.Condition()

    def report(self, line: str) -> None:
        with self._came:
            self.append(line)
            self._came.notify_all()

    def wait_for(self, number: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self) >= number, timeout=30)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_PAUSES", ((float("inf"), 0.01),))


def test_the_first_line_comes_after_five_seconds_and_then_one_every_ten() -> None:
    assert progress.FIRST_SECONDS == 5.0
    assert progress._PAUSES[0] == (60.0, 10.0)


def test_short_work_reports_nothing() -> None:
    lines = Lines()
    with Progress("work", lines.report) as now:
        now.doing("much")
    assert lines == []


@pytest.mark.usefixtures("often")
def test_long_work_says_what_it_does_and_how_far_it_is() -> None:
    lines = Lines()
    with Progress("loading", lines.report, lambda: "12 MB") as now:
        lines.wait_for(1)
        assert lines[0] == "loading: 12 MB (0 s so far)"
        now.doing("reading")
        now.reached(3, 8, "files")
        lines.wait_for(len(lines) + 2)
        assert lines[-1] == "loading: reading, 3 of 8 files, 12 MB (0 s so far)"
        now.doing("checking")
        lines.wait_for(len(lines) + 2)
        assert lines[-1] == "loading: checking, 12 MB (0 s so far)"
    assert lines[-1] == "loading: done after 0 s"
    assert not any(thread.name == "progress of loading" for thread in threading.enumerate())


@pytest.mark.usefixtures("often")
def test_work_that_is_given_up_is_not_called_done() -> None:
    lines = Lines()
    with Progress("loading", lines.report) as now:
        lines.wait_for(1)
        now.give_up()
    assert all("still working" in line for line in lines)


@pytest.mark.usefixtures("often")
def test_work_that_fails_is_not_called_done() -> None:
    lines = Lines()

    def fail() -> None:
        with Progress("loading", lines.report):
            lines.wait_for(1)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert all("still working" in line for line in lines)


def test_another_thread_can_ask_how_far_the_work_is() -> None:
    lines = Lines()
    with Activity() as activity:
        assert (activity.changes, activity.text()) == (0, "nothing yet")
        with Progress("loading", lines.report, lambda: "12 MB") as now:
            assert (activity.changes, activity.text()) == (1, "loading: 12 MB")
            now.doing("reading")
            now.reached(3, 8, "files")
            assert (activity.changes, activity.text()) == (3, "loading: reading, 3 of 8 files, 12 MB")
            with Progress("converting", lines.report) as inner:
                counted = inner.count("ab", "tensors")
                assert next(counted) + next(counted) == "ab"
                assert (activity.changes, activity.text()) == (5, "converting: 1 tensors")
            assert activity.text() == "loading: reading, 3 of 8 files, 12 MB"
        assert (activity.changes, activity.text()) == (7, "after loading")
    with Progress("something else", lines.report):
        assert activity.changes == 7


@pytest.mark.parametrize("has_logging", [True, False])
def test_lines_are_logged_or_printed(
    has_logging: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Callable[..., object]
) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _: has_logging)
    # a program that another test ran in this process may have left a handler whose stream is closed
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("twinkle"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("twinkle"), "propagate", True)
    caplog.set_level("INFO")
    progress._log("a line")
    printed = capsys.readouterr().err  # type: ignore[attr-defined]
    assert ("a line" in caplog.text, printed) == ((True, "") if has_logging else (False, "twinkle: a line\n"))


def test_libraries_draw_no_bars_with_our_variables() -> None:
    script = (
        "import tqdm; from transformers.utils import logging\n"
        "print(logging.is_progress_bar_enabled(), tqdm.tqdm(range(3)).disable)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**progress.NO_BARS}, timeout=120
    )
    assert (done.stdout, done.stderr) == ("False True\n", "")
