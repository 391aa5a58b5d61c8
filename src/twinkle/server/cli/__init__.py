"""The command ``twinkle-server``: starting a server, and the commands for operators.

May import: everything.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.server.cli.command_line import main

__all__ = ["main"]


def __getattr__(name: str) -> object:
    """Load the command line when it is asked for: ``import twinkle.server`` needs none of it."""
    if name == "main":
        from twinkle.server.cli.command_line import main

        return main
    raise AttributeError(name)
