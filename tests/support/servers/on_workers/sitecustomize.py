"""Python imports this at the start of every process whose path has it: Ray's workers get the tuning of their server."""

import os
import sys

if os.environ.get("TWINKLE_TEST_TUNING") and any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
    from tests.support.servers.tuning import tune

    tune(os.environ["TWINKLE_TEST_TUNING"].split())
