"""Read the config.json of a model that is on this machine already, without downloading or building anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle.errors import UserError
from twinkle.hub.model_id import (
    HuggingFaceId,
    LocalFolderId,
    ModelScopeId,
    PypiId,
    RandomId,
    parse_model_id,
    resolve_model_id_alias,
)
from twinkle.hub.pypi import pypi_model_cache
from twinkle.hub.random_model import random_model_config
from twinkle.utils.requirements import exists

__all__ = ["read_local_config"]


def read_local_config(model_id: str) -> Mapping[str, Any] | None:
    """Return the contents of a model's config.json; None if the model is not on this machine, or has none.

    Nothing is downloaded, so a model that :func:`twinkle.hub.resolve` would find may be missing here.
    """
    try:
        parsed = parse_model_id(resolve_model_id_alias(model_id))
    except UserError:
        return None
    match parsed:
        case RandomId():
            return random_model_config(parsed.name)
        case LocalFolderId():
            return _read(parsed.path)
        case PypiId():
            return _read(pypi_model_cache(parsed))
        case HuggingFaceId():
            return _read(_hugging_face_folder(parsed))
        case ModelScopeId():
            return _read(_modelscope_folder(parsed))


def _hugging_face_folder(model: HuggingFaceId) -> Path | None:
    if not exists("huggingface_hub"):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def _modelscope_folder(model: ModelScopeId) -> Path | None:
    if not exists("modelscope"):
        return None
    from modelscope import snapshot_download

    try:
        return Path(snapshot_download(model.name, revision=model.revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - an edge: what it raises for a missing model differs between its versions
        return None


def _read(folder: Path | None) -> Mapping[str, Any] | None:
    if folder is None:
        return None
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # absent or unreadable: whoever loads the model says so
        return None
    return content if isinstance(content, dict) else None
