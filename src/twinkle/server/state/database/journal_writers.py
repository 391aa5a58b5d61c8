"""Several processes that append to the same journals: each has a number, and its segments carry it.

A process holds a lock on the file of its number. Segments of a number whose lock is free belong to nobody any more:
whatever their writer had committed is committed, and nothing will be added to them.
"""

import fcntl
import os
import secrets
from itertools import count
from pathlib import Path

__all__ = ["ALONE", "JournalWriters"]

ALONE = 0  # the number of a server that shares its journals with nobody
_SUFFIX = ".writer"


class JournalWriters:
    """The writers of one data directory; we are number :attr:`own` until :meth:`close`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._fd, self.own = self._claim()

    def is_dead(self, writer: int) -> bool:
        """Whether nobody writes under this number any more."""
        try:
            fd = os.open(self._path(writer), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def forget_dead(self, with_segments: set[int]) -> None:
        """Remove the files of dead writers of which no segment is left."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            writer = int(path.stem)
            if writer not in with_segments and self.is_dead(writer):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)

    def _claim(self) -> tuple[int, int]:
        """A number that nobody had. Its file is locked before it has its name: nobody ever sees it unlocked."""
        unnamed = self._directory / f".{secrets.token_hex(8)}"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        highest = max((int(path.stem) for path in self._directory.glob(f"*{_SUFFIX}")), default=ALONE)
        try:
            for number in count(highest + 1):
                try:
                    os.link(unnamed, self._path(number))
                except FileExistsError:
                    continue
                return fd, number
        finally:
            unnamed.unlink()
        raise AssertionError("there are always more numbers")

    def _path(self, writer: int) -> Path:
        return self._directory / f"{writer:08d}{_SUFFIX}"
