"""The interface of a hub, the types of its requests, and the prefixes of names that choose a hub."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError

__all__ = [
    "WEIGHT_FILES",
    "DatasetRequest",
    "Hub",
    "RepoType",
    "Source",
    "Upload",
    "bytes_of",
    "require_hf",
    "split_source",
]

Source = Literal["hf", "ms"]
RepoType = Literal["model", "dataset"]

# Files that are not downloaded when only a config or tokenizer is needed.
WEIGHT_FILES = (
    "*.bin",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.pt",
    "*.pth",
    "*.safetensors",
    "*.tflite",
)


@dataclass(frozen=True)
class Upload:
    """One upload of a folder to a repository; without ``path_in_repo``, to the top of the repository."""

    repo_id: str
    folder_path: Path
    path_in_repo: str | None = None
    commit_message: str | None = None
    commit_description: str | None = None
    token: str | None = None
    private: bool = False
    revision: str = "master"
    ignore_patterns: Sequence[str] | None = None


@dataclass(frozen=True)
class DatasetRequest:
    """One request to load a dataset; ``options`` are further arguments of ``datasets.load_dataset``."""

    dataset_id: str
    subset_name: str
    split: str
    streaming: bool
    revision: str | None
    token: str | None
    options: dict[str, Any]


class Hub(Protocol):
    """The interface of a hub, used by :class:`HubOperation`. Ids have no ``hf://`` or ``ms://`` prefix."""

    @classmethod
    def try_login(cls, token: str | None) -> bool: ...

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None, private: bool) -> str: ...

    @classmethod
    def push_to_hub(cls, upload: Upload) -> str: ...

    @classmethod
    def load_dataset(cls, request: DatasetRequest) -> Any: ...

    @classmethod
    def download_model(
        cls, model_id: str, revision: str | None, ignore_patterns: Sequence[str], token: str | None
    ) -> Path: ...

    @classmethod
    def model_bytes(
        cls, model_id: str, revision: str | None, ignore_patterns: Sequence[str], token: str | None
    ) -> int: ...

    @classmethod
    def download_file(
        cls, repo_id: str, repo_type: RepoType, allow_patterns: Sequence[str] | None, token: str | None
    ) -> Path: ...


def bytes_of(files: Iterable[tuple[str, int | None]], ignore_patterns: Sequence[str]) -> int:
    """Return the total size of those ``files``, (name, bytes) pairs, that match none of the patterns."""
    return sum(size or 0 for name, size in files if not any(fnmatchcase(name, pattern) for pattern in ignore_patterns))


def split_source(name: str) -> tuple[Source, str]:
    """Split ``hf://x`` or ``ms://x`` into hub and name; a name without a prefix is on ModelScope."""
    scheme, separator, rest = name.partition("://")
    if not separator:
        return "ms", name
    if scheme == "hf":
        require_hf(name)
        return "hf", rest
    if scheme == "ms":
        return "ms", rest
    raise InvalidInputError("repository", name, "hf://org/name, ms://org/name or org/name (ModelScope)")


def require_hf(name: str) -> None:
    if read_environment().forbid_hf:
        raise InvalidInputError("repository", name, "ms://org/name: TWINKLE_FORBID_HF is set")
