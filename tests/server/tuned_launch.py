"""``twinkle-server`` with some of its constants changed: tests cannot wait six minutes for a gap to be given up.

Arguments before ``--`` are ``name=seconds`` with the names below, those after it are twinkle-server's own.
"""

import ctypes
import signal
import sys

from twinkle.server import cli, embedded, signed_urls, snapshots
from twinkle.server.mock import MockSampler, MockTrainer
from twinkle.server.scheduler import Scheduler
from twinkle.server.state import database, keys

TUNING = {
    "pass": lambda seconds: MockTrainer.__init__.__kwdefaults__.update(pause=seconds),  # a batch of passes takes this
    "sample": lambda seconds: MockSampler.__init__.__kwdefaults__.update(pause=seconds),  # a turn of the sampler does
    "gap": lambda seconds: Scheduler.__init__.__kwdefaults__.update(gap_timeout=seconds),
    "snapshot": lambda seconds: setattr(snapshots, "_INTERVAL_SECONDS", seconds),
    "key_cache": lambda seconds: setattr(keys, "_CACHE_SECONDS", seconds),
    "outage": lambda seconds: setattr(database, "_OUTAGE_SECONDS", seconds),
    "signed_url": lambda seconds: setattr(signed_urls, "_VALID_SECONDS", seconds),
    "housekeeping": lambda seconds: setattr(embedded, "_HOUSEKEEPING_SECONDS", seconds),
}

_PARENT_DIED = 1  # prctl(2): PR_SET_PDEATHSIG

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)  # a test that is killed leaves no server behind
    split = sys.argv.index("--")
    for setting in sys.argv[1:split]:
        name, _, seconds = setting.partition("=")
        TUNING[name](float(seconds))
    cli.main(sys.argv[split + 1 :])
