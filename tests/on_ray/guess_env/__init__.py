"""An environment in the layout of the OpenEnv project, which workers import."""

from dataclasses import dataclass


@dataclass
class GuessAction:
    number: int
