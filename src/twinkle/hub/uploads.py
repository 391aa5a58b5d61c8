"""Uploads that go on while training does."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from twinkle.errors import TwinkleError, UnknownNameError

__all__ = ["BackgroundUploads"]

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
