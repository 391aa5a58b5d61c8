"""TransformersModel: the library's verbs for one Hugging Face model, trained in full or with PEFT adapters.

Scripts import the models of the library from here as well as from ``twinkle.model``.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.model.multi_lora.model import MultiLoraTransformersModel
    from twinkle.model.transformers.model import TransformersModel
    from twinkle.model.transformers.value_model import TransformersValueModel

__all__ = ["MultiLoraTransformersModel", "TransformersModel", "TransformersValueModel"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        return find_name(__name__, name)
    return load("twinkle.model", name)  # which imports the class's module on first use
