"""Messages to people, above all when a program fails."""

from twinkle.notifier.ding import DingNotifier
from twinkle.notifier.exceptions import notify_exception, report_uncaught
from twinkle.notifier.interface import Notifier

__all__ = ["DingNotifier", "Notifier", "notify_exception", "report_uncaught"]
