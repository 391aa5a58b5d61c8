"""Find the files of a model on the client's machine: for scripts that also load it with Transformers, or its tokenizer.

A model is found, in this order, as a folder of this machine, as the folder of a server that runs on this machine, or on
a hub, if the hub's own package is installed here.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from twinkle_client.client.current import find_client
from twinkle_client.client.session import parsed
from twinkle_client.compatibility import PATHS, missing
from twinkle_client.errors import InvalidRequestError, MissingPackageError, NotFoundError, invalid
from twinkle_client.protocol.sessions import ModelInfoResponse
from twinkle_client.remote import id_text, model_name, service_path

__all__ = ["LocalModel", "load_tokenizer", "resolve"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")


@dataclass(frozen=True)
class LocalModel:
    """A model whose files are on this machine: a Hugging Face style folder.

    With a ``random_seed`` the folder holds config and tokenizer only, because the server draws the weights from that
    seed. None means that the weights are in the folder.
    """

    model_id: str
    path: Path
    random_seed: int | None


def resolve(model_id: str | os.PathLike[str]) -> LocalModel:
    """Return the folder of a model on this machine, downloading the model from its hub if need be."""
    model_id = id_text(model_id)
    return LocalModel(model_id, _folder(model_id, ignored=()), _random_seed(model_id))


def load_tokenizer(model_id: str | os.PathLike[str]) -> Any:
    """Return the model's tokenizer, loaded on this machine with Transformers."""
    model_id = id_text(model_id)
    folder = _folder(model_id, ignored=_WEIGHTS)
    transformers = _optional(
        "transformers",
        f"the tokenizer of {model_id} is loaded on this machine; templates of twinkle_client.template encode and "
        "decode on the server and do not need it",
    )
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _folder(model_id: str, ignored: tuple[str, ...]) -> Path:
    """Return the folder of a model's files. ``ignored``: patterns of files that need not be downloaded."""
    if not isinstance(model_id, str) or not model_id:
        raise invalid("model_id", model_id, "the id of a model, or a folder")
    folder = Path(model_id).expanduser()
    if "://" not in model_id and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise invalid("model_id", model_id, "a folder with config.json, or the id of a model")
        return folder.absolute()
    served = _folder_of_server(model_id)
    return _downloaded(model_id, ignored) if served is None else served


def _folder_of_server(model_id: str) -> Path | None:
    """Return the folder in which the server has the model; None unless the server runs on this machine.

    The server tells folders only to clients on its own machine, and those may share no files with it (a container).
    """
    client = find_client()
    if client is None or client.closed:
        return None
    try:
        answer = client.get(f"{service_path('model', model_name(model_id))}/get_info")
    except NotFoundError:  # it does not serve this model
        return None
    told = parsed(ModelInfoResponse, answer, client.base_url).model_folder
    return Path(told) if told is not None and (Path(told) / "config.json").is_file() else None


def _downloaded(model_id: str, ignored: tuple[str, ...]) -> Path:
    scheme, separator, name = model_id.partition("://")
    source, name = (scheme, name) if separator else ("hf", model_id)
    if source not in ("hf", "ms") or name.count("/") != 1:
        raise InvalidRequestError(
            f"model_id: {model_id!r} has no files on this machine: it is no folder here, and no server on this machine "
            "serves it. The client itself downloads only hf://org/name and ms://org/name"
        )
    name, _, revision = name.partition("@")
    return Path(_snapshot(source, name, revision or None, ignored))


def _snapshot(source: str, name: str, revision: str | None, ignored: tuple[str, ...]) -> str:
    package = "huggingface_hub" if source == "hf" else "modelscope"
    hub = _optional(package, f"{source}://{name} is on no server of this machine, and this package downloads it")
    return str(hub.snapshot_download(name, revision=revision, ignore_patterns=list(ignored)))


def _optional(package: str, reason: str) -> Any:
    """Return a package that the client does not depend on; raise MissingPackageError if it is not installed."""
    if find_spec(package) is None:
        raise MissingPackageError(f"pip install {package}: {reason}")
    return import_module(package)


def _random_seed(model_id: str) -> int | None:
    if not model_id.startswith("random://"):
        return None
    return int(parse_qs(model_id.partition("?")[2]).get("seed", ["0"])[0])


def __getattr__(name: str) -> object:
    raise missing(PATHS, __name__, name)
