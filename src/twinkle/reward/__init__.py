"""Rewards of completions. They only read text and do not need torch."""

from twinkle.reward.competition_math import MathReward
from twinkle.reward.gsm8k import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.reward.interface import Reward
from twinkle.reward.olympiad import (
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
)
from twinkle.reward.tags import FormatReward, MultiModalAccuracyReward

__all__ = [
    "FormatReward",
    "GSM8KAccuracyReward",
    "GSM8KFormatReward",
    "MathReward",
    "MultiModalAccuracyReward",
    "OlympiadBenchAccuracyReward",
    "OlympiadBenchFormatReward",
    "OlympiadBenchQualityReward",
    "Reward",
]
