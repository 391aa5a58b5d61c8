"""A game of three moves: each move 0, 1 or 2 that is legal scores a third of a point."""

from typing import Any

from openspiel_env import OpenSpielAction, OpenSpielObservation

_MOVES = 3


class OpenSpielEnvironment:
    def __init__(self, game_name: str = "catch", **options: Any) -> None:
        self.game_name = game_name
        self._moves = 0

    def reset(self, **options: Any) -> OpenSpielObservation:
        self._moves = 0
        return self._observation(None)

    def step(self, action: OpenSpielAction, **options: Any) -> OpenSpielObservation:
        self._moves += 1
        return self._observation(1 / _MOVES if action.action_id in range(3) else 0.0)

    def close(self) -> None:
        """Release nothing."""

    def _observation(self, reward: float | None) -> OpenSpielObservation:
        board = [float(self._moves > place) for place in range(_MOVES)]
        return OpenSpielObservation(board, [0, 1, 2], done=self._moves >= _MOVES, reward=reward)
