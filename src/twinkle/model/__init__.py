"""Training: the multi-tenant :class:`Trainer`, the :class:`FullTrainer` of all parameters, and the library's models.

Heavy names (those that need torch and transformers) are imported when they are first used, not with this package.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from twinkle.compatibility import find_name, unusable_name
from twinkle.extras import load, missing
from twinkle.model.types import (
    AdamParams,
    AdapterSnapshot,
    Datum,
    FullSpec,
    LoraSpec,
    ObjectiveValue,
    TokenValues,
    TrainFailure,
    TrainItem,
    TrainResult,
)

if TYPE_CHECKING:
    from twinkle.model.decoder.loading import adopt_model
    from twinkle.model.full.trainer import FullTrainer
    from twinkle.model.library.interface import TwinkleModel
    from twinkle.model.megatron.library.model import MegatronModel
    from twinkle.model.megatron.library.multi_lora import MultiLoraMegatronModel
    from twinkle.model.multi_lora.model import MultiLoraTransformersModel
    from twinkle.model.trainer.trainer import Trainer
    from twinkle.model.transformers.model import TransformersModel
    from twinkle.model.transformers.value_model import TransformersValueModel

__all__ = [
    "AdamParams",
    "AdapterSnapshot",
    "Datum",
    "FullSpec",
    "FullTrainer",
    "LoraSpec",
    "MegatronModel",
    "MultiLoraMegatronModel",
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
    "FullTrainer": "twinkle.model.full.trainer",
    "MegatronModel": "twinkle.model.megatron.library.model",
    "MultiLoraMegatronModel": "twinkle.model.megatron.library.multi_lora",
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
    if "megatron" in _HOME[name] and not _has_megatron_core():
        # Scripts import models of both backends and use one. The other may lack its package until it is used.
        return unusable_name(__name__, name, missing("megatron", name))
    return load(_HOME[name], name)


def _has_megatron_core() -> bool:
    """Return whether megatron-core is installed. Any folder named megatron on the path is a namespace package too."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
