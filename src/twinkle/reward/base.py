"""Compatibility path: scripts import ``Reward`` from ``twinkle.reward.base``. It is defined in ``interface``."""

from twinkle.reward.interface import Reward

__all__ = ["Reward"]
