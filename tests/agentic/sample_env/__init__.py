"""A package in the layout of the OpenEnv project: a number must be guessed. It needs nothing of OpenEnv itself."""

from dataclasses import dataclass

__all__ = ["GuessAction", "Hint"]


@dataclass
class GuessAction:
    number: int


@dataclass
class Hint:
    hint: str
    reward: float | None = None
    done: bool = False
