"""Apply the server's tuning in Ray's workers.

Python imports this module at the start of every process that has it on its path.
"""

import os
import sys

if os.environ.get("TWINKLE_TEST_TUNING") and any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
    from tests.support.servers.tuning import tune

    tune(os.environ["TWINKLE_TEST_TUNING"].split())
