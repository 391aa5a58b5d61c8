"""Patches: changes of a model that can be undone. torch is imported when a patch that needs it is first used."""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.patch.interface import NoSplitModulesPatch, Patch, apply_context, apply_patch
    from twinkle.patch.output_heads import TransformersEmbeddingPatch, TransformersFusedCEPatch, get_lm_head_model

__all__ = [
    "NoSplitModulesPatch",
    "Patch",
    "TransformersEmbeddingPatch",
    "TransformersFusedCEPatch",
    "apply_context",
    "apply_patch",
    "get_lm_head_model",
]

_HOME = {
    "NoSplitModulesPatch": "twinkle.patch.interface",
    "Patch": "twinkle.patch.interface",
    "TransformersEmbeddingPatch": "twinkle.patch.output_heads",
    "TransformersFusedCEPatch": "twinkle.patch.output_heads",
    "apply_context": "twinkle.patch.interface",
    "apply_patch": "twinkle.patch.interface",
    "get_lm_head_model": "twinkle.patch.output_heads",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
