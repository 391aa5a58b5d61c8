"""Settings of all tests."""

import os

# Workers of pytest-xdist share the cores: two threads in each of two workers would wait for each other. torch reads the
# variable when it is imported; tests that are about threads set their number themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
