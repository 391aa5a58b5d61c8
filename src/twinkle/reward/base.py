"""Compatibility path: scripts import ``Reward`` from ``twinkle.reward.base``. It lives in the module ``interface``."""

from twinkle.reward.interface import Reward

__all__ = ["Reward"]
