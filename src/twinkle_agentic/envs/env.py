"""What an environment is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from twinkle.data_format import Tool
from twinkle.errors import UnsupportedError

__all__ = ["Env", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What an action led to: what is seen now, the reward of the action, whether the episode is over."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Env(ABC):
    """One episode at a time. A context manager: it is closed at the end."""

    @abstractmethod
    def reset(self, trajectory: Mapping[str, Any] | None = None) -> StepResult:
        """Begin an episode; ``trajectory`` is the row that it is for, where the environment looks at it."""

    @abstractmethod
    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult: ...

    def tools(self) -> list[Tool]:
        """The actions that it knows, as chat templates list tools. None: actions have no names of their own."""
        return []

    def evaluate(self, trajectory: Mapping[str, Any]) -> float:
        """The reward of a whole trajectory, of an environment that judges at the end."""
        raise UnsupportedError(f"{type(self).__name__}: evaluate: it rewards actions, not whole trajectories")

    def close(self) -> None:
        """Give back what it holds."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
