"""Which process serves a data directory: ``server.json`` there, locked by that process as long as it lives."""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from twinkle.errors import TwinkleServerError

_FILE = "server.json"
_WAIT_SECONDS = 360.0  # a server finishes what runs, and puts every adapter on disk
_PAUSE = 0.2


@dataclass(frozen=True)
class ServerProcess:
    pid: int
    url: str


@contextlib.contextmanager
def recorded(data_dir: Path, url: str) -> Iterator[None]:
    """This process serves there under this URL, until it leaves or dies."""
    path = data_dir / _FILE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.truncate(fd, 0)
        os.write(fd, json.dumps(asdict(ServerProcess(os.getpid(), url))).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


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
    while running(data_dir) == server:
        if time.monotonic() > deadline:
            raise TwinkleServerError(f"process {server.pid} still runs after {_WAIT_SECONDS:.0f} s")
        time.sleep(_PAUSE)
    return True
