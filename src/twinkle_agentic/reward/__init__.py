"""Rewards of conversations with tools. They import ``twinkle.reward``; nltk only when a word is stemmed."""

from twinkle_agentic.reward.cot import CoTReward
from twinkle_agentic.reward.f1 import F1Reward
from twinkle_agentic.reward.tool_explore import ToolExploreReward

__all__ = ["CoTReward", "F1Reward", "ToolExploreReward"]
