"""Waiting for what workers return, and for their failures."""

import re
from collections.abc import Sequence
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from twinkle.errors import WorkerDiedError, WorkerTimeoutError
from twinkle.infra.lazy_result import Origin

__all__ = ["gather"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Ray writes for terminals


def gather(refs: Sequence[Any], origin: Origin, timeout: float | None) -> list[Any]:
    """The values of all ``refs``. The first failure is raised when it happens, whoever else is still at work."""
    deadline = None if timeout is None else monotonic() + timeout
    waiting = {ref: place for place, ref in enumerate(refs)}
    values: list[Any] = [None] * len(refs)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - monotonic())
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        if not done:
            late = sorted(origin.workers[place] for place in waiting.values())
            raise WorkerTimeoutError(origin.component, origin.group, origin.method, late, timeout or 0.0)
        place = waiting.pop(done[0])
        values[place] = _value(done[0], origin, origin.workers[place])
    return values


def _value(ref: Any, origin: Origin, worker: int) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = _cause(error)
        cause.add_note(f"raised by {_place(origin, worker)}:\n{_COLOURS.sub('', str(error))}")
        raise cause from None
    except RayActorError as error:
        raise WorkerDiedError(origin.component, origin.group, origin.method, worker, str(error)) from error
    except RayError as error:  # the result is lost, or cannot be read here
        error.add_note(f"the result of {_place(origin, worker)}")
        raise


def _cause(error: RayTaskError) -> BaseException:
    """What the worker raised; Ray wraps it once for every process on the way."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, RayError):  # what was raised cannot be sent: Ray has its text
        return RuntimeError(str(cause))
    return cause


def _place(origin: Origin, worker: int) -> str:
    return f"{origin.component!r}.{origin.method} on rank {worker} of group {origin.group!r}"
