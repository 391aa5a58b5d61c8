"""Processors, which make batches for models. torch is imported when a name is first used."""

from typing import TYPE_CHECKING

from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.processor.input_processor import InputProcessor

__all__ = ["InputProcessor"]

_HOME = {"InputProcessor": "twinkle.processor.input_processor"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(_HOME[name], name)
