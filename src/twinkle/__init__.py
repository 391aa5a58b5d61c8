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
    DataError,
    DownloadError,
    InvalidInputError,
    MissingDependencyError,
    NonFiniteError,
    StreamError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
    UploadError,
    UserError,
)

if TYPE_CHECKING:
    from twinkle.infra import initialize
    from twinkle.logger import get_logger
    from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult
    from twinkle.network import find_free_port, find_node_ip
    from twinkle.plugin import Plugin
    from twinkle.remote_code import check_unsafe, trust_remote_code
    from twinkle.requirements import exists, requires

__all__ = [
    "AdamParams",
    "AdapterExistsError",
    "AdapterNotFoundError",
    "CapacityError",
    "CheckpointError",
    "DataError",
    "Datum",
    "DownloadError",
    "InvalidInputError",
    "LoraSpec",
    "MissingDependencyError",
    "NonFiniteError",
    "Plugin",
    "StreamError",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "TwinkleError",
    "UnknownNameError",
    "UnsupportedError",
    "UploadError",
    "UserError",
    "check_unsafe",
    "exists",
    "find_free_port",
    "find_node_ip",
    "get_logger",
    "initialize",
    "requires",
    "trust_remote_code",
]

__version__ = "0.1.0"

_LAZY = {
    "AdamParams": "twinkle.model",
    "Datum": "twinkle.model",
    "LoraSpec": "twinkle.model",
    "Plugin": "twinkle.plugin",
    "TrainFailure": "twinkle.model",
    "TrainItem": "twinkle.model",
    "TrainResult": "twinkle.model",
    "Trainer": "twinkle.model",
    "check_unsafe": "twinkle.remote_code",
    "exists": "twinkle.requirements",
    "find_free_port": "twinkle.network",
    "find_node_ip": "twinkle.network",
    "get_logger": "twinkle.logger",
    "initialize": "twinkle.infra",
    "requires": "twinkle.requirements",
    "trust_remote_code": "twinkle.remote_code",
}


def __getattr__(name: str) -> object:
    if name == "framework_util":  # a module, used as twinkle.framework_util.seed_everything()
        return import_module("twinkle.framework_util")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
