"""The client's log lines: shown on the console by ``initialize``, and one line for each choice left to the server."""

import logging
from functools import cache

from twinkle_client.environment import log_level

__all__ = ["left_to_server", "show_log_lines"]

logger = logging.getLogger(__name__)

_NAME = "twinkle_client"
_FORMAT = "[%(asctime)s][%(levelname)s:%(name)s] %(message)s"


def show_log_lines() -> None:
    """Print the client's log lines from the level LOG_LEVEL on, as ``twinkle.initialize`` prints the library's.

    A program that has set up logging itself, for the client or for all loggers, is not interfered with.
    """
    own = logging.getLogger(_NAME)
    if own.hasHandlers():
        return
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter(_FORMAT))
    own.addHandler(console)
    own.setLevel(log_level())
    own.propagate = False  # a handler that the program gives the root later would print the lines again


def left_to_server(what: str, **options: object) -> None:
    """Log once which of the ``options`` were given (are not None) although ``what`` does not use them.

    They are options of the library's classes about devices, precision, memory and processes, which are the server's
    decision.
    """
    given = tuple(sorted(name for name, value in options.items() if value is not None))
    if given:
        _log_once(what, given)


@cache  # log once, even if a script makes many objects
def _log_once(what: str, names: tuple[str, ...]) -> None:
    logger.info("%s: the server decides about %s; the script's values are not used", what, ", ".join(names))
