"""Resolve a model id to a folder on this machine."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle.extras import require
from twinkle.hub.model_folder import require_model_folder
from twinkle.hub.model_id import (
    HuggingFaceId,
    LocalFolderId,
    ModelScopeId,
    PypiId,
    RandomId,
    id_text,
    parse_model_id,
    resolve_model_id_alias,
)
from twinkle.hub.pypi import pypi_model_folder
from twinkle.hub.random_model import random_model_folder
from twinkle.hub.remote import download_from_hugging_face, download_from_modelscope
from twinkle.hub.repository import require_hf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LocalModel", "load_tokenizer", "loadable_name", "resolve"]


@dataclass(frozen=True)
class LocalModel:
    """A model that can be loaded: a Hugging Face style folder.

    With a ``random_seed`` the folder holds config and tokenizer only, and the loader draws the weights on the device
    from that seed. None means that the weights are in the folder.
    """

    model_id: str
    path: Path
    random_seed: int | None


def resolve(model_id: str | PathLike[str]) -> LocalModel:
    """Return the local folder of a model, downloading and converting the model the first time."""
    model_id = id_text(model_id)
    parsed = parse_model_id(resolve_model_id_alias(model_id))
    match parsed:
        case HuggingFaceId():
            require_hf(model_id)
            return LocalModel(model_id, download_from_hugging_face(parsed), None)
        case ModelScopeId():
            return LocalModel(model_id, download_from_modelscope(parsed), None)
        case LocalFolderId():
            return LocalModel(model_id, require_model_folder(parsed.path), None)
        case PypiId():
            return LocalModel(model_id, pypi_model_folder(parsed), None)
        case RandomId():
            return LocalModel(model_id, random_model_folder(parsed.name), parsed.seed)


def loadable_name(model_id: str | PathLike[str]) -> str:
    """Return the name by which Transformers and PEFT find the model: ``org/name``, or the folder on this machine.

    Saved adapters have it as the name of their base model. A ``random://`` folder has no weights to load.
    """
    parsed = parse_model_id(resolve_model_id_alias(model_id))
    if isinstance(parsed, HuggingFaceId):
        return parsed.name
    return str(parsed.path if isinstance(parsed, LocalFolderId) else resolve(model_id).path)


def load_tokenizer(model_id: str | PathLike[str]) -> "PreTrainedTokenizerBase":
    """Return the model's tokenizer; downloads the whole model if it is not on this machine yet."""
    require("transformers", "load_tokenizer")
    path = resolve(model_id).path
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)
