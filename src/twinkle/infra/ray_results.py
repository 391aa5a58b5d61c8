"""Wait for the results of workers, and raise their failures."""

import re
from collections.abc import Sequence
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from twinkle.errors import WorkerDiedError, WorkerTimeoutError
from twinkle.infra.collect import Origin

__all__ = ["gather", "wait_together"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # colour codes of terminals, which Ray writes into error texts


def gather(refs: Sequence[Any], origin: Origin, timeout: float | None) -> list[Any]:
    """Return the values of all ``refs``. The first failure is raised at once, even if other workers are still busy."""
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


def wait_together(calls: Sequence[tuple[Sequence[Any], Origin]]) -> None:
    """Wait until several calls have ended. The first failure of any of them is raised at once."""
    waiting = {
        ref: (origin, worker) for refs, origin in calls for ref, worker in zip(refs, origin.workers, strict=True)
    }
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        _value(done[0], *waiting.pop(done[0]))


def _value(ref: Any, origin: Origin, worker: int) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = _cause(error)
        cause.add_note(f"raised by {_place(origin, worker)}:\n{_COLOURS.sub('', str(error))}")
        raise cause from None
    except RayActorError as error:
        raise WorkerDiedError(origin.component, origin.group, origin.method, worker, str(error)) from error
    except RayError as error:  # the result is lost, or cannot be deserialized here
        error.add_note(f"the result of {_place(origin, worker)}")
        raise


def _cause(error: RayTaskError) -> BaseException:
    """Return the exception that the worker raised. Ray wraps it once for each process that it passes through."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, RayError):  # the original exception cannot be pickled: Ray sends its text
        return RuntimeError(str(cause))
    return cause


def _place(origin: Origin, worker: int) -> str:
    return f"{origin.component!r}.{origin.method} on rank {worker} of group {origin.group!r}"
