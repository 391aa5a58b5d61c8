"""The hub operations for ModelScope. Its client library is installed with our extra ``modelscope``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinkle.environment import read_environment
from twinkle.errors import DownloadError, TwinkleError, UploadError
from twinkle.extras import missing
from twinkle.hub.cache import announce
from twinkle.hub.repository import DatasetRequest, RepoType, Upload, bytes_of

__all__ = ["MSHub"]


class MSHub:
    """The hub operations through the modelscope library.

    A dataset's repository is downloaded whole and read by ``datasets.load_dataset``, not by modelscope's MsDataset,
    which patches the ``datasets`` package and needs old versions of it.
    """

    @classmethod
    def try_login(cls, token: str | None) -> bool:
        """Log in with ``token``; without one, return False and check nothing."""
        api = _api("logging in to ModelScope")
        if token is None:
            return False
        with _errors(UploadError, "cannot log in to ModelScope"):
            api.login(token)
        return True

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None, private: bool) -> str:
        """Create the repository unless it exists, and return its id."""
        api = _api(f"ms://{repo_id}")
        with _errors(UploadError, f"cannot create ms://{repo_id}"):
            api.create_repo(
                repo_id,
                token=token,
                visibility="private" if private else "public",
                repo_type="model",
                exist_ok=True,
            )
        return repo_id

    @classmethod
    def push_to_hub(cls, upload: Upload) -> str:
        """Create the repository if needed, commit the folder to it, and return the repository's id."""
        cls.create_model_repo(upload.repo_id, upload.token, upload.private)
        announce(f"uploading {upload.folder_path} to ms://{upload.repo_id}")
        with _errors(UploadError, f"cannot upload to ms://{upload.repo_id}"):
            _api(f"ms://{upload.repo_id}").upload_folder(
                repo_id=upload.repo_id,
                folder_path=str(upload.folder_path),
                path_in_repo=upload.path_in_repo or "",
                commit_message=upload.commit_message,
                commit_description=upload.commit_description,
                token=upload.token,
                revision=upload.revision,
                ignore_patterns=None if upload.ignore_patterns is None else list(upload.ignore_patterns),
            )
        return upload.repo_id

    @classmethod
    def load_dataset(cls, request: DatasetRequest) -> Any:
        folder = cls._snapshot(request.dataset_id, "dataset", request.revision, None, (), request.token)
        from datasets import load_dataset

        with _errors(DownloadError, f"cannot load the dataset ms://{request.dataset_id}"):
            return load_dataset(
                str(folder),
                name=None if request.subset_name == "default" else request.subset_name,
                split=request.split,
                streaming=request.streaming,
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
        api = _api(f"ms://{model_id}")
        with _errors(DownloadError, f"cannot look up ms://{model_id}"):
            files = api.get_model_files(model_id, revision=revision, recursive=True)
        return bytes_of(((file["Path"], file.get("Size")) for file in files), ignore_patterns)

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
        try:
            from modelscope import snapshot_download
        except ImportError as error:
            raise missing("modelscope", f"ms://{repo_id}") from error
        offline = read_environment().offline
        if not offline:
            announce(f"looking up {repo_id} on ModelScope")
        with _errors(DownloadError, f"cannot download ms://{repo_id}"):
            folder = snapshot_download(
                repo_id,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=None if allow_patterns is None else list(allow_patterns),
                ignore_patterns=list(ignore_patterns) or None,
                token=token,
                local_files_only=offline,
            )
        return Path(folder)


def _api(purpose: str) -> Any:
    try:
        from modelscope import HubApi
    except ImportError as error:
        raise missing("modelscope", purpose) from error
    return HubApi()


@contextmanager
def _errors(kind: type[TwinkleError], what: str) -> Iterator[None]:
    """Turn errors of the client library into a ``kind`` whose message starts with ``what``."""
    from modelscope.hub.errors import HubError  # since 1.38; before that its errors had no common base

    try:
        yield
    except (HubError, OSError, RuntimeError, ValueError) as error:
        raise kind(f"{what}: {type(error).__name__}: {error}; check name, revision and access rights") from error
