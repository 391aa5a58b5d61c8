"""Errors cross process boundaries: the error that a worker raises arrives unchanged."""

import inspect
import os
import pickle
import subprocess
import sys

import pytest

from tests.support.paths import SOURCE
from twinkle import errors
from twinkle.errors import TwinkleError

SRC = SOURCE
WORKERS = """
from twinkle.dataset import Dataset, DatasetMeta
Dataset(DatasetMeta(data=[{"a": 1}] * 4)).map("GSM8KProcessor", num_proc=2)
"""

ARGUMENTS = {"field": "f", "kind": "k", "package": "p", "extra": "e", "purpose": "q", "known": ["x"]}
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, TwinkleError)]


def made(kind: type[TwinkleError]) -> TwinkleError:
    if not inspect.isfunction(kind.__init__):
        return kind("message")
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    return kind(*(ARGUMENTS.get(name, "x") for name in names))


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_survive_pickling(kind):
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_a_mistake_in_a_worker_process_is_reported():
    """The pool runs in its own process, with a time limit.

    A pool waits forever if its worker raises an error that cannot be unpickled.
    """
    pytest.importorskip("datasets")
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", WORKERS], env=environment, capture_output=True, text=True, timeout=120)
    assert "InvalidInputError: columns: got ['a'], allowed: one named answer" in done.stderr
