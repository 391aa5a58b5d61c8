"""Twinkle: many tenants fine-tune and sample their own LoRA adapters on one base model.

``import twinkle`` is cheap. The names in ``_LAZY`` load their module, and torch with it, on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CapacityError,
    CheckpointError,
    DownloadError,
    InvalidInputError,
    MissingDependencyError,
    NonFiniteError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)

if TYPE_CHECKING:
    from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult

__all__ = [
    "AdamParams",
    "AdapterExistsError",
    "AdapterNotFoundError",
    "CapacityError",
    "CheckpointError",
    "Datum",
    "DownloadError",
    "InvalidInputError",
    "LoraSpec",
    "MissingDependencyError",
    "NonFiniteError",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "TwinkleError",
    "UnknownNameError",
    "UnsupportedError",
    "UserError",
]

__version__ = "0.1.0"

_LAZY = {
    "AdamParams": "twinkle.model",
    "Datum": "twinkle.model",
    "LoraSpec": "twinkle.model",
    "TrainFailure": "twinkle.model",
    "TrainItem": "twinkle.model",
    "TrainResult": "twinkle.model",
    "Trainer": "twinkle.model",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
