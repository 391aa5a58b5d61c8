"""The command ``twinkle-server``: starting a server, and the commands for operators.

May import: everything.
"""

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from twinkle.extras import extra_of, missing

__all__ = ["main"]

_NO_LAUNCH = ("-h", "--help", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``twinkle-server`` and return its exit code.

    Imports take seconds on a busy machine, so the first line of ``launch`` comes before them. The command line is
    imported here: ``import twinkle.server`` needs none of it, and without the extra ``server`` the message says so.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    is_launch = given[:1] == ["launch"] or (given[:1] != [] and given[0].startswith("-"))
    if is_launch and not set(given) & set(_NO_LAUNCH):
        _announce_start(as_json="--log-format json" in " ".join(given).replace("=", " "))
    try:
        from twinkle.server.cli.command_line import main as run
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        print(f"twinkle-server: {missing(error.name, 'the server', extra='server')}", file=sys.stderr)
        return 1
    return run(given)


def _announce_start(*, as_json: bool) -> None:
    """Print a line in the form of a log line: logging is set up only when the configuration has been read."""
    now, line = datetime.now(UTC), f"twinkle-server starts as process {os.getpid()}: loading modules"
    if as_json:
        time = now.isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "level": "info", "logger": "twinkle.server", "message": line})
    print(line, file=sys.stderr, flush=True)
