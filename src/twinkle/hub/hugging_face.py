"""The hub operations for Hugging Face."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from twinkle.environment import read_environment
from twinkle.errors import DownloadError, TwinkleError, UploadError
from twinkle.extras import require
from twinkle.hub.cache import announce
from twinkle.hub.repository import DatasetRequest, RepoType, Upload, bytes_of
from twinkle.utils.progress import Progress

__all__ = ["HFHub"]


class HFHub:
    """The hub operations through huggingface_hub and ``datasets.load_dataset``, with their caches and credentials."""

    @classmethod
    def try_login(cls, token: str | None) -> bool:
        """Log in with ``token``; without one, return whether this machine is logged in already."""
        _require("logging in to Hugging Face")
        from huggingface_hub import get_token, login

        if token is None:
            return get_token() is not None
        with _errors(UploadError, "cannot log in to Hugging Face"):
            login(token=token)
        return True

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None, private: bool) -> str:
        """Create the repository unless it exists, and return its URL."""
        _require(f"hf://{repo_id}")
        from huggingface_hub import create_repo

        with _errors(UploadError, f"cannot create hf://{repo_id}"):
            return str(create_repo(repo_id, token=token, private=private, exist_ok=True))

    @classmethod
    def push_to_hub(cls, upload: Upload) -> str:
        """Create the repository if needed, commit the folder to it, and return the commit's URL."""
        cls.create_model_repo(upload.repo_id, upload.token, upload.private)
        from huggingface_hub import upload_folder

        announce(f"uploading {upload.folder_path} to hf://{upload.repo_id}")
        waiting = Progress(f"uploading to hf://{upload.repo_id}")
        with _errors(UploadError, f"cannot upload to hf://{upload.repo_id}"), waiting:
            commit = upload_folder(
                repo_id=upload.repo_id,
                folder_path=upload.folder_path,
                path_in_repo=upload.path_in_repo,
                commit_message=upload.commit_message,
                commit_description=upload.commit_description,
                token=upload.token,
                # the default branch is "master" on ModelScope and "main" here
                revision="main" if upload.revision == "master" else upload.revision,
                ignore_patterns=None if upload.ignore_patterns is None else list(upload.ignore_patterns),
            )
        return str(commit)

    @classmethod
    def load_dataset(cls, request: DatasetRequest) -> Any:
        from datasets import load_dataset

        with _errors(DownloadError, f"cannot load the dataset hf://{request.dataset_id}"):
            return load_dataset(
                request.dataset_id,
                # a dataset with one subset usually calls it "default"; None finds it whatever its name is
                name=None if request.subset_name == "default" else request.subset_name,
                split=request.split,
                streaming=request.streaming,
                revision=request.revision,
                token=request.token,
                **request.options,
            )

    @classmethod
    def download_model(
        cls, model_id: str, revision: str | None, ignore_patterns: Sequence[str], token: str | None
    ) -> Path:
        return cls._snapshot(model_id, "model", revision, None, ignore_patterns, token)

    @classmethod
    def model_bytes(cls, model_id: str, revision: str | None, ignore_patterns: Sequence[str], token: str | None) -> int:
        """Return how many bytes :meth:`download_model` would fetch into an empty cache, according to the hub."""
        _require(f"hf://{model_id}")
        from huggingface_hub import HfApi

        with _errors(DownloadError, f"cannot look up hf://{model_id}"):
            branch = "main" if revision == "master" else revision
            info = HfApi().model_info(model_id, revision=branch, files_metadata=True, token=token)
        return bytes_of(((file.rfilename, file.size) for file in info.siblings or ()), ignore_patterns)

    @classmethod
    def download_file(
        cls, repo_id: str, repo_type: RepoType, allow_patterns: Sequence[str] | None, token: str | None
    ) -> Path:
        return cls._snapshot(repo_id, repo_type, None, allow_patterns, (), token)

    @classmethod
    def _snapshot(
        cls,
        repo_id: str,
        repo_type: RepoType,
        revision: str | None,
        allow_patterns: Sequence[str] | None,
        ignore_patterns: Sequence[str],
        token: str | None,
    ) -> Path:
        _require(f"hf://{repo_id}")
        from huggingface_hub import snapshot_download

        offline = read_environment().offline
        if not offline:
            announce(f"looking up {repo_id} on Hugging Face")
        waiting = Progress(f"downloading hf://{repo_id}", detail=lambda: _megabytes_of(repo_id, repo_type))
        with _errors(DownloadError, f"cannot download hf://{repo_id}"), waiting:
            folder = snapshot_download(
                repo_id,
                repo_type=repo_type,
                revision="main" if revision == "master" else revision,
                allow_patterns=None if allow_patterns is None else list(allow_patterns),
                ignore_patterns=list(ignore_patterns) or None,
                token=token,
                local_files_only=offline,
            )
        return Path(folder)


def _megabytes_of(repo_id: str, repo_type: RepoType) -> str:
    """Return how much of a repository is in the cache, as text."""
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"{repo_type}s--{repo_id.replace('/', '--')}" / "blobs"
    size = 0
    for path in blobs.glob("*"):
        with suppress(FileNotFoundError):  # it is renamed when it is complete
            size += path.stat().st_size
    return f"{size / 1e6:.0f} MB in the cache"


def _require(purpose: str) -> None:
    require("huggingface_hub", purpose)


@contextmanager
def _errors(kind: type[TwinkleError], what: str) -> Iterator[None]:
    """Turn errors of the client library into a ``kind`` whose message starts with ``what``."""
    # The base class of the library's HTTP errors; it comes from requests or httpx, depending on the version.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise kind(f"{what}: {type(error).__name__}: {error}; check name, revision and access rights") from error
