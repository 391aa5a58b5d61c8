"""``queue_config`` of the older form: what a queue let in. Its rates became tokens a minute of a tenant."""

import math
from typing import Any

from twinkle.server.config.conversion import Conversion, Handler, at_least, dropped, only, take_all, to_limit

__all__ = ["QUEUE", "convert_queue"]

_RATES = {
    "model": ("max_training_tokens_per_minute",),
    "sampler": ("max_sampling_tokens_per_minute",),
    "task_queue": ("max_training_tokens_per_minute", "max_sampling_tokens_per_minute"),
}
_WINDOW_SECONDS = 1.0  # what held where a file did not say
_PATIENT = "what was accepted is computed, however long it waits"
_NEVER_STOPPED = "nothing is stopped while it computes"
_NO_QUEUE = dropped("this application has no queue")


def _window(conversion: Conversion, path: str, value: Any) -> None:
    if _is_number(value) and 0 < value < math.inf:
        conversion.drop(path, "tps_limit became tokens a minute")
    else:
        conversion.refuse(path, value, "a number > 0")


# `tps_limit` is here for its name: what it becomes depends on the application.
QUEUE: dict[str, Handler] = {
    "max_input_tokens": to_limit("max_tokens_per_request"),
    "tps_limit": _NO_QUEUE,
    "window_seconds": _window,
    "rps_limit": dropped("requests are not counted by time: tokens a minute and what may wait are limited"),
    "token_cleanup_multiplier": dropped("what was counted needs no sweeping"),
    "token_cleanup_interval": dropped("what was counted needs no sweeping"),
    "queue_timeout": at_least(300, _PATIENT, f"300 or more ({_PATIENT}); remove the key"),
    "execution_timeout": at_least(120, _NEVER_STOPPED, f"0, or 120 or more ({_NEVER_STOPPED}); remove the key", none=0),
    "enabled": only(True, "limits are always checked", "true (limits are always checked); raise the limits instead"),
}


def convert_queue(conversion: Conversion, holder: dict[str, Any], key: str, at: str, kind: str) -> None:
    """Take the section out of ``holder``. ``kind``: of the application, or task_queue, which is for all of them."""
    if kind not in _RATES:
        take_all(conversion, holder, key, at, dict.fromkeys(QUEUE, _NO_QUEUE))
        return
    section = holder.get(key)
    window = section.get("window_seconds") if isinstance(section, dict) else None
    handlers = {**QUEUE, "tps_limit": _rate(_RATES[kind], window)}
    if kind == "sampler":
        handlers["max_input_tokens"] = dropped("a prompt may be as long as the model's context")
    take_all(conversion, holder, key, at, handlers)


def _rate(limits: tuple[str, ...], window: object) -> Handler:
    """So many tokens in ``window`` seconds."""
    seconds = window if isinstance(window, int | float) and window > 0 else _WINDOW_SECONDS

    def handle(conversion: Conversion, path: str, value: Any) -> None:
        a_minute = value * 60 / seconds if _is_number(value) else -1
        if not math.isfinite(a_minute) or a_minute < 0:
            conversion.refuse(path, value, "a number ≥ 0")
        elif value == 0:
            conversion.drop(path, "0 was to mean no limit")
        else:
            for name in limits:
                conversion.limit(path, max(1, round(a_minute)), name)

    return handle


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
