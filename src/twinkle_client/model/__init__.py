"""Models that are trained on a server."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_client.model.multi_lora_model import MultiLoraTransformersModel
    from twinkle_client.model.results import Number, Result, SaveResult, Text

__all__ = ["MultiLoraTransformersModel", "Number", "Result", "SaveResult", "Text"]

_HOME = {
    "MultiLoraTransformersModel": "twinkle_client.model.multi_lora_model",
    "Number": "twinkle_client.model.results",
    "Result": "twinkle_client.model.results",
    "SaveResult": "twinkle_client.model.results",
    "Text": "twinkle_client.model.results",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
