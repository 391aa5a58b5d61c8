"""Stand-in for OpenEnv's package of board games."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["OpenSpielAction", "OpenSpielObservation"]


@dataclass
class OpenSpielAction:
    action_id: int
    game_name: str = "catch"
    game_params: dict[str, Any] = field(default_factory=dict)


@dataclass
class OpenSpielObservation:
    info_state: list[float]
    legal_actions: list[int]
    game_phase: str = "playing"
    current_player_id: int = 0
    done: bool = False
    reward: float | None = None
