"""What guards a data directory: the lock of whoever works in it, and space in reserve for when its disk is full.

A server on a full disk cannot even start: SQLite wants to write before it reads. What fills the disk is often the
journal, which only a running server prunes. So a file of some megabytes lies there for nothing else than to be removed.
"""

import errno
import fcntl
import logging
import os
import sqlite3
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from twinkle.server.state.errors import DataDirInUseError

_PAUSE = 0.05  # seconds between two tries


class DirectoryLock(AbstractContextManager["DirectoryLock"]):
    """A file of the directory, locked until :meth:`release`, the end of a ``with``, or the end of the process.

    It says who works with a data directory: one server alone, or the processes of one server together.
    """

    def __init__(self, data_dir: Path, *, name: str = "lock", shared: bool = False, wait_seconds: float = 0.0) -> None:
        """``shared``: with others that share it, and with nobody who wants it alone. Blocks for ``wait_seconds``."""
        self._fd = os.open(data_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_seconds
        while not try_lock(self._fd, shared=shared):
            if time.monotonic() >= deadline:
                os.close(self._fd)
                raise DataDirInUseError(data_dir)
            time.sleep(_PAUSE)

    def release(self) -> None:
        os.close(self._fd)

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(fd: int, *, shared: bool) -> bool:
    """Lock an open file until it is closed; returns whether that was possible at once."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- space in reserve -------------------------------------------------------------------------------------------------

RESERVE_BYTES = 8 * 1024 * 1024
_NAME = "reserve"
_LOW = 2 * 1024 * 1024  # bytes: with less than this nothing of ours works
_PLENTY = 4 * RESERVE_BYTES  # bytes: with less than this left behind it, no reserve is made
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What SQLite says when it cannot write: which of them depends on what it was about to do.
_SQLITE_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_FSYNC"})

_logger = logging.getLogger(__name__)


def keep_reserve(data_dir: Path) -> None:
    """Make the reserve where it is missing and there is plenty of room."""
    file = data_dir / _NAME
    with suppress(OSError):
        if file.exists() and file.stat().st_size == RESERVE_BYTES:
            return
        if _free(data_dir) < RESERVE_BYTES + _PLENTY:
            return
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        except OSError:
            file.unlink()
        finally:
            os.close(fd)


def give_up_reserve(data_dir: Path, *, only_if_low: bool) -> bool:
    """Remove the reserve; returns whether there was one. ``only_if_low``: only where the disk is full."""
    file = data_dir / _NAME
    try:
        if only_if_low and _free(data_dir) >= _LOW:
            return False
        file.unlink()
    except OSError:
        return False
    _logger.warning("the disk under %s is full: %d bytes held in reserve are free now", data_dir, RESERVE_BYTES)
    return True


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error, or what caused it, says that the disk is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in DISK_FULL:
            return True
        if isinstance(seen, sqlite3.Error) and getattr(seen, "sqlite_errorname", "") in _SQLITE_FULL:
            return True
        seen = seen.__cause__ or seen.__context__ or getattr(seen, "orig", None)
    return False


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
