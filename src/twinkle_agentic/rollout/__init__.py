"""Conversations of several turns."""

from twinkle_agentic.rollout.bridge import extend_with_bridge
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout

__all__ = ["MultiTurnRollout", "extend_with_bridge"]
