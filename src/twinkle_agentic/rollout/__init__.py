"""Conversations of several turns, with tools. They import ``tools``, the library and the client's rounds."""

from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.bridge import extend_with_bridge
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_agentic.rollout.multi_turn_condense import MultiTurnCondenseRollout
from twinkle_agentic.rollout.tinker_sampler import TinkerSampler

__all__ = [
    "APIMultiTurnRollout",
    "MultiTurnCondenseRollout",
    "MultiTurnRollout",
    "Rollout",
    "TinkerSampler",
    "extend_with_bridge",
]
