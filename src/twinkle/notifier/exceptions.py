"""Notification of people about an exception, once for each failure."""

import platform
import sys
import traceback
from types import TracebackType

from twinkle.environment import read_launch
from twinkle.notifier.interface import Notifier
from twinkle.utils.logger import get_logger
from twinkle.utils.parallel import try_claim_once

__all__ = ["notify_exception", "report_uncaught"]

_previous_hook = sys.excepthook
_notifier: Notifier | None = None
_program: str | None = None


def notify_exception(notifier: Notifier | None, context: str, exc: BaseException, name: str | None = None) -> None:
    """Send a message with the exception, its context and its traceback. With ``notifier=None`` nothing is sent.

    The same failure (type of exception, line of code, context, name) of one launch is sent once, also if several
    processes with the same TWINKLE_CACHE_DIR have it. A message that cannot be sent is logged instead of raised, so
    that it does not hide the exception.
    """
    if notifier is None or not _is_first(exc, context, name):
        return
    try:
        notifier(_message(context, exc, name))
    except (OSError, RuntimeError, ValueError) as error:
        get_logger().error(f"the notifier {type(notifier).__name__} could not send its message: {error!r}")


def report_uncaught(notifier: Notifier | None, name: str | None) -> None:
    """From now on, notify ``notifier`` of an Exception that ends this program. None switches this off."""
    global _notifier, _previous_hook, _program
    _notifier, _program = notifier, name
    if sys.excepthook is not _hook:
        _previous_hook = sys.excepthook
    sys.excepthook = _previous_hook if notifier is None else _hook


def _hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    _previous_hook(kind, exc, trace)
    if isinstance(exc, Exception):  # not KeyboardInterrupt or SystemExit
        notify_exception(_notifier, "uncaught exception", exc, _program)


def _is_first(exc: BaseException, context: str, name: str | None) -> bool:
    """Return whether this process is the first of its launch to report this failure."""
    frames = traceback.extract_tb(exc.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return try_claim_once("\0".join((type(exc).__qualname__, place, context, name or "")), namespace="notified")


def _message(context: str, exc: BaseException, name: str | None) -> str:
    launch = read_launch()
    trace = "".join(traceback.format_exception(exc))
    return "\n\n".join(
        (
            f"# {name or 'twinkle'}: {type(exc).__name__}",
            f"{context}: {exc}",
            f"{platform.node()}, Python {platform.python_version()}, rank {launch.rank} of {launch.world_size}",
            f"```\n{trace}```",
        )
    )
