"""Training: the multi-tenant :class:`Trainer` and the nouns of its interface.

What a name needs (torch and transformers, above all) is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle.model.types import (
    AdamParams,
    AdapterSnapshot,
    Datum,
    LoraSpec,
    TrainFailure,
    TrainItem,
    TrainResult,
)

if TYPE_CHECKING:
    from twinkle.model.loading import adopt_model
    from twinkle.model.trainer import Trainer

__all__ = [
    "AdamParams",
    "AdapterSnapshot",
    "Datum",
    "LoraSpec",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "adopt_model",
]

_HOME = {"Trainer": "twinkle.model.trainer", "adopt_model": "twinkle.model.loading"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
