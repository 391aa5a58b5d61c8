"""Training: the multi-tenant :class:`Trainer`, the types of its interface, and the models of the library.

Heavy names (those that need torch and transformers) are imported when they are first used, not with this package.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load
from twinkle.model.types import (
    AdamParams,
    AdapterSnapshot,
    Datum,
    LoraSpec,
    ObjectiveValue,
    TokenValues,
    TrainFailure,
    TrainItem,
    TrainResult,
)

if TYPE_CHECKING:
    from twinkle.model.decoder.loading import adopt_model
    from twinkle.model.library.interface import TwinkleModel
    from twinkle.model.multi_lora.model import MultiLoraTransformersModel
    from twinkle.model.trainer.trainer import Trainer
    from twinkle.model.transformers.model import TransformersModel
    from twinkle.model.transformers.value_model import TransformersValueModel

__all__ = [
    "AdamParams",
    "AdapterSnapshot",
    "Datum",
    "LoraSpec",
    "MultiLoraTransformersModel",
    "ObjectiveValue",
    "TokenValues",
    "TrainFailure",
    "TrainItem",
    "TrainResult",
    "Trainer",
    "TransformersModel",
    "TransformersValueModel",
    "TwinkleModel",
    "adopt_model",
]

_HOME = {
    "MultiLoraTransformersModel": "twinkle.model.multi_lora.model",
    "Trainer": "twinkle.model.trainer.trainer",
    "TransformersModel": "twinkle.model.transformers.model",
    "TransformersValueModel": "twinkle.model.transformers.value_model",
    "TwinkleModel": "twinkle.model.library.interface",
    "adopt_model": "twinkle.model.decoder.loading",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
