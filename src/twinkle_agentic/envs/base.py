"""The interface of an environment."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from twinkle.data_format import Tool
from twinkle.errors import UnsupportedError

__all__ = ["Env", "StepResult"]


@dataclass
class StepResult:
    """The result of an action: the new observation, the action's reward, and whether the episode is over."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Env(ABC):
    """An environment with one episode at a time. As a context manager it is closed at the end."""

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        """Start an episode. ``trajectory`` is the row that the episode is for; an environment may ignore it."""
        return StepResult()

    @abstractmethod
    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act, and return the observation after the action."""

    def tools(self) -> list[Tool]:
        """Return the actions as tools for chat templates. An empty list: actions have no names of their own."""
        return []

    def evaluate(self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[float]:
        """Return the rewards of whole trajectories, in environments that reward only at the end."""
        raise UnsupportedError(f"{type(self).__name__}: evaluate: it rewards actions, not whole trajectories")

    def close(self) -> None:
        """Release the resources of the environment."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
