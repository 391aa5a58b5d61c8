"""The interface of a rollout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from twinkle.errors import InvalidInputError
from twinkle.utils.logger import get_logger

__all__ = ["Rollout", "Tools", "Trajectory", "made_trace_dir", "managers_for", "write_traces"]

Trajectory = dict[str, Any]
Tools = Callable[[Mapping[str, Any]], str]  # a ToolManager, or a function from a tool call to its answer


class Rollout(ABC):
    """Continues conversations with a model, and runs the tools that it calls."""

    @abstractmethod
    def __call__(self, trajectories: list[Mapping[str, Any]], **kwargs: Any) -> list[Trajectory]:
        """Return the finished trajectories, in the order of those given."""


def managers_for(trajectories: object, given: Tools | Sequence[Tools] | None, default: Tools | None) -> list[Tools]:
    """Return one tool manager for each trajectory: those of the call, or the constructor's.

    Raise TypeError if ``trajectories`` is no list, and ValueError if there are no managers, or not as many as needed.
    """
    if not isinstance(trajectories, list):
        raise TypeError(f"trajectories: got a {type(trajectories).__name__}, allowed: a list")
    chosen = default if given is None else given
    if chosen is None:
        raise InvalidInputError("tool_manager", None, "a ToolManager, in the constructor or in the call")
    if not isinstance(chosen, list | tuple):
        return [chosen] * len(trajectories)  # type: ignore[list-item]
    if len(chosen) != len(trajectories):
        allowed = f"one, or one for each of {len(trajectories)} trajectories"
        raise InvalidInputError("tool_manager", f"{len(chosen)} of them", allowed)
    return list(chosen)


def made_trace_dir(trace_dir: str | Path | None) -> Path | None:
    """Make the folder of traces and return it. Raise InvalidInputError if that is not possible."""
    if trace_dir is None:
        return None
    try:
        Path(trace_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            "trace_dir", str(trace_dir), f"a folder that can be made and written ({error})"
        ) from error
    return Path(trace_dir)


class _Traces(Protocol):
    def write(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        global_step: int | None,
        extras: Sequence[Mapping[str, Any]] | None = None,
    ) -> None: ...


def write_traces(
    traces: _Traces,
    done: Sequence[Mapping[str, Any]],
    global_step: int | None,
    extras: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write traces. A failure, such as a full disk, is logged: the finished conversations must not be lost with it."""
    try:
        traces.write(done, global_step, extras)
    except Exception:  # noqa: BLE001 - a trace must not end a training run
        get_logger().error("traces of this rollout could not be written; the trajectories are complete", exc_info=True)
