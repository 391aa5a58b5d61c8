"""Options of the library's classes that a script may give and a server decides about: devices, memory, processes."""

import logging
from functools import cache

__all__ = ["left_to_server"]

logger = logging.getLogger(__name__)


def left_to_server(what: str, **options: object) -> None:
    """Say once which of the ``options`` were given (are not None), and that ``what`` does not use them."""
    given = tuple(sorted(name for name, value in options.items() if value is not None))
    if given:
        _say(what, given)


@cache  # a script makes many of them
def _say(what: str, names: tuple[str, ...]) -> None:
    logger.info("%s: the server decides about %s; what the script says is not used", what, ", ".join(names))
