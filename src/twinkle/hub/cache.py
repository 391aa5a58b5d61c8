"""The cache of model folders: an entry is whole or absent, and is built by one process at a time.

An entry is built in a hidden work directory beside it and renamed into place, so a process that dies leaves nothing
that looks like a model. The lock is a file lock of the kernel, which is released when its process dies; the process
that takes it next deletes the work directory that the dead process left.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from twinkle.environment import read_environment
from twinkle.errors import DownloadError
from twinkle.utils.progress import Progress

__all__ = ["announce", "cached_folder"]


def cached_folder(key: str, build: Callable[[Path, Path], None]) -> Path:
    """Return the cached folder of ``key`` (a relative path); call ``build(folder, scratch)`` if it does not exist yet.

    ``build`` fills ``folder``; ``scratch`` is a directory for its temporary files and is deleted afterwards.
    """
    cache_dir = read_environment().cache_dir
    entry = cache_dir / key
    try:
        if not entry.is_dir():
            _make_entry(entry, build)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"cannot keep model files in {cache_dir}: {error}; free some space there, or point TWINKLE_CACHE_DIR "
            "to a directory that can be written"
        ) from error
    return entry


def _make_entry(entry: Path, build: Callable[[Path, Path], None]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry):
        if entry.is_dir():  # another process made it while we waited for the lock
            return
        for leftover in entry.parent.glob(f".{entry.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{entry.name}.partial-", dir=entry.parent))
        try:
            folder, scratch = work / "folder", work / "scratch"
            folder.mkdir()
            scratch.mkdir()
            build(folder, scratch)
            _flush_to_disk(folder)
            os.replace(folder, entry)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(entry.parent / f".{entry.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        announce(f"another process is preparing {entry.name}, waiting for it")
        with Progress(f"waiting for another process that prepares {entry.name}"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _flush_to_disk(folder: Path) -> None:
    """Sync all files, or a power cut soon after the rename could leave an entry that looks complete but is empty."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def announce(stage: str) -> None:
    """Print one progress line to stderr; stdout stays free for the program's own output."""
    print(f"twinkle: {stage}", file=sys.stderr, flush=True)
