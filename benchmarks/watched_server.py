"""Run twinkle-server, and write down what its threads do whenever the server is late.

A thread of its own wakes every millisecond. It writes a line of JSON to FILE in two cases: it woke ``LATE_MS`` later
than that, because another thread held the interpreter or the machine was busy; or the event loop has been in callbacks
for so long. The line has the time (of the monotonic clock), the case, how late it was, and the innermost calls of all
threads. Of a thread that held the interpreter, the calls are those right after it let go.

    python benchmarks/watched_server.py build/bench/late.jsonl launch -c server.yaml
"""

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from twinkle.server.cli.command_line import main

WAKE_SECONDS = 0.001
LATE_MS = 5.0
CALLS = 6  # of each thread
_IDLE = "runners.py"  # asyncio's: the event loop waits, or runs code that is not Python's


def watch(path: Path) -> None:
    """Write a line for each time the server is late. It never returns."""
    loop = threading.main_thread().ident
    assert loop is not None, "the main thread has begun"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) as lines:

        def write(case: str, milliseconds: float, found: dict[str, list[str]]) -> None:
            line = {"at": woke, "case": case, "ms": round(milliseconds, 1), "calls": found}
            lines.write(json.dumps(line) + "\n")

        woke = idle = time.monotonic()
        of_loop: dict[str, list[str]] = {}  # what the threads did when the event loop began to be late
        while True:
            time.sleep(WAKE_SECONDS)
            before, woke = woke, time.monotonic()
            frames = sys._current_frames()
            late = 1000 * (woke - before - WAKE_SECONDS)
            if late > LATE_MS:
                write("all threads", late, calls(frames))
            if frames[loop].f_code.co_filename.endswith(_IDLE):
                if of_loop:
                    write("event loop", 1000 * (before - idle), of_loop)
                idle, of_loop = woke, {}
            elif not of_loop and 1000 * (woke - idle) > LATE_MS:
                of_loop = calls(frames)


def calls(frames: dict[int, FrameType]) -> dict[str, list[str]]:
    """Return the innermost calls of each thread, by its name."""
    names = {each.ident: each.name for each in threading.enumerate()}
    found = {}
    for number, frame in frames.items():
        if number != threading.get_ident():
            found[names.get(number, str(number))] = [
                f"{Path(each.f_code.co_filename).name}:{each.f_lineno} {each.f_code.co_name}"
                for each in innermost(frame)
            ]
    return found


def innermost(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < CALLS:
        found.append(frame)
        frame = frame.f_back
    return found


if __name__ == "__main__":
    threading.Thread(target=watch, args=(Path(sys.argv[1]),), name="watch", daemon=True).start()
    sys.exit(main(sys.argv[2:]))
