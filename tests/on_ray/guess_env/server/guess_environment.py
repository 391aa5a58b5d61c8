"""The number 5 must be guessed. The environment reports the process in which it runs."""

import os
from dataclasses import dataclass

from tests.on_ray.guess_env import GuessAction


@dataclass
class GuessResult:
    observation: str
    reward: float | None = None
    done: bool = False


class GuessEnvironment:
    def reset(self) -> GuessResult:
        return GuessResult(f"rank {os.environ['RANK']}")

    def step(self, action: GuessAction) -> GuessResult:
        return GuessResult("right", 1.0, True) if action.number == 5 else GuessResult("wrong", 0.0)
