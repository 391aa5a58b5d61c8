"""Advantages computed from rewards and, for GAE, values. torch is imported when a name is first used."""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.advantage.gae import GAEAdvantage
    from twinkle.advantage.group_relative import Advantage, GRPOAdvantage, RLOOAdvantage

__all__ = ["Advantage", "GAEAdvantage", "GRPOAdvantage", "RLOOAdvantage"]

_HOME = {
    "Advantage": "twinkle.advantage.group_relative",
    "GAEAdvantage": "twinkle.advantage.gae",
    "GRPOAdvantage": "twinkle.advantage.group_relative",
    "RLOOAdvantage": "twinkle.advantage.group_relative",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
