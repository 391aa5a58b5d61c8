"""Run tutorials of tinker-cookbook, each in a process of its own. The cookbook's Python runs this file.

Every line of standard input is a JSON object with the paths ``tutorial``, ``output`` (everything the tutorial prints)
and ``results`` (what its cells defined), and ``seconds``, after which it is killed. One line of standard output answers
it: the exit code, negative for a signal. The imports that all tutorials need take longer than most tutorials, so this
process does them once and forks.
"""

import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import datasets  # noqa: F401
import marimo  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import tinker
import tinker_cookbook.renderers
import tinker_cookbook.rl.train
import tinker_cookbook.supervised.train
import tinker_cookbook.weights  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401


def main() -> None:
    assert threading.active_count() == 1, "forking is safe only without other threads"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
            return  # the child ends like any program, with its exit handlers
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(request: dict[str, Any]) -> None:
    """Run a tutorial in this process, which nothing else uses."""
    signal.alarm(request["seconds"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    _, definitions = runpy.run_path(request["tutorial"])["app"].run()
    plain = {name: value for name, value in definitions.items() if _is_plain(value)}
    Path(request["results"]).write_text(json.dumps(plain | {"tinker_version": tinker.__version__}))


def _is_plain(value: object) -> bool:
    """Return whether JSON can express a value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
