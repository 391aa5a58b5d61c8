"""Which process serves a data directory: ``server.json`` there, locked by that process as long as it lives."""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from twinkle.errors import TwinkleServerError
from twinkle.server.state.errors import DataDirInUseError

_FILE = "server.json"
_WAIT_SECONDS = 360.0  # a server finishes what runs, and puts every adapter on disk
_PAUSE = 0.2
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class ServerProcess:
    """``url`` is None until it serves."""

    pid: int
    url: str | None = None


@contextlib.contextmanager
def recorded(data_dir: Path) -> Iterator[Callable[[str], None]]:
    """This process serves there, until it leaves or dies: another one is refused. To be told under which URL."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = data_dir / _FILE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(url: str | None) -> None:
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(ServerProcess(os.getpid(), url))).encode(), 0)

    try:
        _lock(fd, data_dir)
        try:
            write(None)
            yield write
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _lock(fd: int, data_dir: Path) -> None:
    """Whoever only looks holds the lock for a moment."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DataDirInUseError(data_dir) from None
            time.sleep(_PAUSE)


def running(data_dir: Path) -> ServerProcess | None:
    """The process that serves there now."""
    try:
        fd = os.open(data_dir / _FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ServerProcess(**json.loads(os.pread(fd, 65_536, 0)))
    finally:
        os.close(fd)
    return None  # it was killed, and left its file


def stop(data_dir: Path) -> bool:
    """Ask the server there to end and wait until it has; False: there is none."""
    server = running(data_dir)
    if server is None:
        return False
    os.kill(server.pid, signal.SIGTERM)
    print(f"process {server.pid} finishes what runs", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _WAIT_SECONDS
    while (now := running(data_dir)) is not None and now.pid == server.pid:
        if time.monotonic() > deadline:
            raise TwinkleServerError(f"process {server.pid} still runs after {_WAIT_SECONDS:.0f} s")
        time.sleep(_PAUSE)
    return True
