"""An environment in the layout of the OpenEnv project, which workers import.

It reports the process in which it runs.
"""

import os
from dataclasses import dataclass


@dataclass
class GuessAction:
    number: int


@dataclass
class GuessResult:
    observation: str
    reward: float | None = None
    done: bool = False


class GuessEnv:
    def reset(self) -> GuessResult:
        return GuessResult(f"rank {os.environ['RANK']}")

    def step(self, action: GuessAction) -> GuessResult:
        return GuessResult("right", 1.0, True) if action.number == 5 else GuessResult("wrong", 0.0)
