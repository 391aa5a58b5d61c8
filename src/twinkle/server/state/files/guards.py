"""The creation and the lock of a data directory, and its reserve: disk space that is freed when the disk is full.

A server cannot even start on a full disk, because SQLite writes before it reads. Often it is the journal that fills the
disk, and only a running server prunes the journal. So a file of some megabytes, the reserve, exists only to be deleted
in this case.
"""

import errno
import fcntl
import logging
import os
import sqlite3
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from twinkle.errors import TwinkleServerError
from twinkle.server.state.errors import DataDirInUseError

_PAUSE = 0.05  # seconds between two tries


def make_data_dir(data_dir: Path) -> None:
    """Create the directory unless it exists. TwinkleServerError if that fails or this user may not write there."""
    reason = ""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
    else:
        if not os.access(data_dir, os.W_OK | os.X_OK):
            reason = f"user {os.getuid()} may not write there"
    if reason:
        raise TwinkleServerError(
            f"cannot use the data directory {data_dir}: {reason}; choose another with --data-dir or data_dir in the "
            "configuration"
        )


class DirectoryLock(AbstractContextManager["DirectoryLock"]):
    """A lock on a file of the directory, held until :meth:`release`, the end of a ``with``, or the end of the process.

    The file ``lock`` (the default) is the lock of a data directory: one server or command holds it exclusively, or the
    processes of one server share it.
    """

    def __init__(self, data_dir: Path, *, name: str = "lock", shared: bool = False, wait_seconds: float = 0.0) -> None:
        """Take the lock; DataDirInUseError if it is not free within ``wait_seconds``. Blocks that long.

        ``shared``: others may hold the lock too if they share it; without it, no other process may hold it.
        """
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
    """Lock an open file until it is closed, without waiting; return whether that was possible."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- space in reserve -------------------------------------------------------------------------------------------------

RESERVE_BYTES = 8 * 1024 * 1024
_NAME = "reserve"
_LOW = 2 * 1024 * 1024  # bytes: with less free space than this the server does not work
_PLENTY = 4 * RESERVE_BYTES  # bytes: the reserve is made only if this much stays free
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The errors of SQLite when the disk is full. Which one it is depends on what SQLite was about to write.
_SQLITE_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_FSYNC"})

_logger = logging.getLogger(__name__)


def keep_reserve(data_dir: Path) -> None:
    """Create the reserve file if it is missing and there is enough free space. Errors are ignored."""
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
    """Delete the reserve file; return whether it was deleted. ``only_if_low``: only if less than 2 MiB are free."""
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
    """Return whether an error, or one of its causes, says that the disk is full."""
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
