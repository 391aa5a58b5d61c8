"""Processes of one machine: locks in files, work that only one of them does, and seeds that all of them agree on.

Files are in the cache directory (TWINKLE_CACHE_DIR). The kernel frees a lock when its process ends.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType

from twinkle.environment import read_environment

__all__ = ["PosixFileLock", "processing_lock", "stable_seed", "try_claim_once"]

# How long a claim is kept. Its name includes the session_id of the launch, so another launch can claim the same key.
_SECONDS_KEPT = 86400.0


class PosixFileLock:
    """A lock that one process holds at a time, by a file that is made if it is missing and never deleted.

    A forked or pickled copy does not hold the lock of its original. One thread may use an object at a time.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._owner = os.getpid()  # the process that opened the descriptor

    def acquire(self, blocking: bool = True) -> bool:
        """Wait for the lock, or return False at once if it is taken and ``blocking`` is False."""
        if self.is_held:
            raise RuntimeError(f"{self.path}: this object holds the lock already")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:  # such as KeyboardInterrupt while it waits
            os.close(descriptor)
            raise
        self._descriptor, self._owner = descriptor, os.getpid()
        return True

    def release(self) -> None:
        """Free the lock. No effect if this process does not hold it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._owner == os.getpid():
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)  # in a fork this closes a copy, and the lock stays with the parent

    def close(self) -> None:
        self.release()

    @property
    def is_held(self) -> bool:
        if self._descriptor is not None and self._owner != os.getpid():
            self.release()
        return self._descriptor is not None

    def __enter__(self) -> "PosixFileLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __reduce__(self) -> tuple[type["PosixFileLock"], tuple[str]]:
        return PosixFileLock, (str(self.path),)


@contextmanager
def processing_lock(name: str) -> Iterator[None]:
    """Let one process run the body first. The others wait for it and then run theirs at the same time, without a lock.

    It suits work whose result the first process leaves in a cache for the others.
    """
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    lock = PosixFileLock(read_environment().cache_dir / "locks" / f"{safe}.lock")
    if not lock.acquire(blocking=False):
        with lock:
            pass
        yield
        return
    try:
        yield
    finally:
        lock.release()


def try_claim_once(key: str, *, payload: str = "", namespace: str = "claim") -> bool:
    """Return True in the first process of a launch that calls it with this key, and False in all later calls.

    ``payload`` is written to the claim's file. If the file cannot be written, every process gets True: work that is
    done twice is better than work that nobody does.
    """
    environment = read_environment()
    folder = environment.cache_dir / "".join(c if c.isalnum() or c in "-_" else "_" for c in namespace)
    name = hashlib.sha256("\0".join((environment.session_id, key)).encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if time.time() - old.stat().st_mtime > _SECONDS_KEPT:
                old.unlink(missing_ok=True)
        with (folder / name).open("x", encoding="utf-8") as claim:
            claim.write(payload)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def stable_seed(*parts: object) -> int:
    """Return a seed from 0 to 2³²−1 made of the texts of ``parts``: the same in every process and on every machine."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
