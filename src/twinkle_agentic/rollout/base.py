"""The interface of a rollout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["Rollout", "Tools", "Trajectory", "managers_for"]

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
