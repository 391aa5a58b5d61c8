"""Rollouts of agents: tools run in this process, the model is sampled on a server."""

from twinkle_client.rollout.bridge import extend_with_bridge
from twinkle_client.rollout.multi_turn import ClientMultiTurnRollout

__all__ = ["ClientMultiTurnRollout", "extend_with_bridge"]
