"""Append tool answers to sampled tokens. The code is shared with the client and lives there."""

from twinkle_client.rollout.bridge import BridgeTemplate, extend_with_bridge

__all__ = ["BridgeTemplate", "extend_with_bridge"]
