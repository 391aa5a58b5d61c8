"""Who works with a data directory: one server alone, or the processes of one server together, each the only one of its
name."""

import fcntl
import os
import time
from pathlib import Path

from twinkle.server.state.errors import DataDirInUseError

__all__ = ["DirectoryLock"]

_PAUSE = 0.05  # seconds between two tries


class DirectoryLock:
    """A file of the directory, locked until :meth:`release` or until the process ends."""

    def __init__(self, data_dir: Path, *, name: str = "lock", shared: bool = False, wait_seconds: float = 0.0) -> None:
        """``shared``: with others that share it, and with nobody who wants it alone. Blocks for ``wait_seconds``."""
        self._fd = os.open(data_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_seconds
        while not _try(self._fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                os.close(self._fd)
                raise DataDirInUseError(data_dir)
            time.sleep(_PAUSE)

    def release(self) -> None:
        os.close(self._fd)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
