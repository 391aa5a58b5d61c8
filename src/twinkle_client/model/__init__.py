"""Models that are trained on a server."""

from importlib import import_module
from typing import TYPE_CHECKING

from twinkle_client.compatibility import PATHS, missing

if TYPE_CHECKING:
    from twinkle_client.model.multi_lora_model import MultiLoraTransformersModel
    from twinkle_client.model.trainer import (
        AdamParams,
        Datum,
        LoraSpec,
        Trainer,
        TrainFailure,
        TrainItem,
        TrainResult,
    )
    from twinkle_client.model.transformers_model import TransformersModel

__all__ = [
    "AdamParams",
    "Datum",
    "LoraSpec",
    "MultiLoraTransformersModel",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "TransformersModel",
]

_HOME = {
    "AdamParams": "twinkle_client.model.trainer",
    "Datum": "twinkle_client.model.trainer",
    "LoraSpec": "twinkle_client.model.trainer",
    "MultiLoraTransformersModel": "twinkle_client.model.multi_lora_model",
    "TrainFailure": "twinkle_client.model.trainer",
    "TrainItem": "twinkle_client.model.trainer",
    "TrainResult": "twinkle_client.model.trainer",
    "Trainer": "twinkle_client.model.trainer",
    "TransformersModel": "twinkle_client.model.transformers_model",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise missing(PATHS, __name__, name)
    return getattr(import_module(_HOME[name]), name)
