"""Run ``twinkle-server`` with some of its constants changed; on Ray also in its workers.

Arguments before ``--`` are ``name=number`` with the names of tuning.py. Arguments after it go to twinkle-server.
"""

import ctypes
import os
import signal
import sys

from tests.support.paths import PROGRAMS
from tests.support.servers.tuning import tune
from twinkle.server.cli import command_line as cli

_PARENT_DIED = 1  # prctl(2): PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, so that a killed test run leaves no server behind."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    end_with_parent()
    split = arguments.index("--")
    tuning = arguments[:split]
    timings = tune(tuning)
    if tuning:
        os.environ["TWINKLE_TEST_TUNING"] = " ".join(tuning)
        os.environ["PYTHONPATH"] = f"{PROGRAMS / 'on_workers'}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(cli.main(arguments[split + 1 :], timings))


if __name__ == "__main__":
    main(sys.argv[1:])
