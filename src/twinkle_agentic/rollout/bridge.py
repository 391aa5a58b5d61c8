"""What tools said, appended to the tokens that were sampled; the client has the same need, and the code."""

from twinkle_client.rollout.bridge import BridgeTemplate, extend_with_bridge

__all__ = ["BridgeTemplate", "extend_with_bridge"]
