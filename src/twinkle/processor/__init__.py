"""Processors, which make batches for models. torch is imported when a name is first used."""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.processor.input_processor import InputProcessor

__all__ = ["InputProcessor"]

_HOME = {"InputProcessor": "twinkle.processor.input_processor"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
