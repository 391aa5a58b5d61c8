"""An environment in which ``secret`` must be guessed; a wrong number costs 0.25."""

from tests.agentic.sample_env import GuessAction, Hint


class Environment:
    """The base class of OpenEnv has this name; it must not be taken for the environment."""


class GuessEnvironment(Environment):
    closed = 0

    def __init__(self, secret: int = 5) -> None:
        self.secret = secret

    def reset(self) -> Hint:
        return Hint("guess")

    def step(self, action: GuessAction) -> Hint:
        if action.number < 0:
            raise ValueError("no negative numbers")
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        return Hint(hint, 1.0 if right else -0.25, right)

    def close(self) -> None:
        GuessEnvironment.closed += 1
