"""The command ``twinkle-server``: starting a server, and the commands for operators.

May import: everything.
"""

import sys
from collections.abc import Sequence

from twinkle.extras import extra_of, missing

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, as :func:`twinkle.server.cli.command_line.main` does.

    The command line is imported here: ``import twinkle.server`` needs none of it, and without the extra ``server`` the
    message says so.
    """
    try:
        from twinkle.server.cli.command_line import main as run
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        print(f"twinkle-server: {missing(error.name, 'the server', extra='server')}", file=sys.stderr)
        return 1
    return run(arguments)
