"""Advantages computed from rewards. torch is imported when a name is first used."""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.advantage.group_relative import Advantage, GRPOAdvantage, RLOOAdvantage

__all__ = ["Advantage", "GRPOAdvantage", "RLOOAdvantage"]

_HOME = {
    "Advantage": "twinkle.advantage.group_relative",
    "GRPOAdvantage": "twinkle.advantage.group_relative",
    "RLOOAdvantage": "twinkle.advantage.group_relative",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
