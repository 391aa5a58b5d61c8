"""The process of a server: its locked record in the data directory (``server.json``), its port, and what it prints."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.state.files.guards import DirectoryLock, make_data_dir, try_lock
from twinkle.utils.progress import Progress

LISTENING = "listening on"  # begins the line of the announcement that holds the URL
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}
_FILE = "server.json"
_WAIT_SECONDS = 360.0  # for a server to finish its work and write snapshots of changed adapters
_PAUSE = 0.2
_LOOK_SECONDS = 1.0  # to wait for the lock: ``running`` in another process holds it for a moment


@dataclass(frozen=True)
class ServerProcess:
    """A process that serves a data directory. ``url`` is None until the process has recorded it, late in its start.

    ``ray_address``: of its Ray cluster, recorded with the URL; None on the embedded runtime.
    """

    pid: int
    url: str | None = None
    ray_address: str | None = None


class Record(Protocol):
    """Records where the server of a data directory answers."""

    def __call__(self, url: str | None, ray_address: str | None = None) -> None: ...


@contextlib.contextmanager
def recorded(data_dir: Path) -> Iterator["Record"]:
    """Record that this process serves the directory, until the context or the process ends.

    DataDirInUseError if another process serves it. The context gives a function that records the URL and, on Ray, the
    cluster's address.
    """
    make_data_dir(data_dir)
    path = data_dir / _FILE
    lock = DirectoryLock(data_dir, name=_FILE, wait_seconds=_LOOK_SECONDS)

    def write(url: str | None, ray_address: str | None = None) -> None:
        path.write_text(json.dumps(asdict(ServerProcess(os.getpid(), url, ray_address))))

    try:
        write(None)
        yield write
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def running(data_dir: Path) -> ServerProcess | None:
    """Return the process that serves the directory now; None if there is none."""
    try:
        fd = os.open(data_dir / _FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        is_left = try_lock(fd, shared=True)  # nobody holds the lock: a killed process left the file behind
        return None if is_left else ServerProcess(**json.loads(os.pread(fd, 65_536, 0)))
    finally:
        os.close(fd)


def stop(data_dir: Path) -> bool:
    """Ask the server of the directory to stop and wait until it has; return False if there is none.

    TwinkleServerError if it still runs after six minutes.
    """
    server = running(data_dir)
    if server is None:
        return False
    os.kill(server.pid, signal.SIGTERM)
    print(f"process {server.pid} finishes what runs", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _WAIT_SECONDS
    with Progress(f"waiting for process {server.pid}", detail=lambda: "it finishes running work and writes snapshots"):
        while (now := running(data_dir)) is not None and now.pid == server.pid:
            if time.monotonic() > deadline:
                raise TwinkleServerError(f"process {server.pid} still runs after {_WAIT_SECONDS:.0f} s")
            time.sleep(_PAUSE)
    return True


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; TwinkleServerError if that fails. Call it first, so that a taken port is known at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise TwinkleServerError(
            f"cannot listen on {host}:{port}: {reason}; stop what listens there or choose another --port"
        ) from error
    return listener


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on this host and port."""
    name = _REACHABLE.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def announcement(
    config: ServerConfig, notes: Sequence[str], memory: Sequence[str], url: str, about_key: Sequence[str] = ()
) -> str:
    """Return the text that a server prints once it serves: its models, its URL, and how to connect.

    ``memory``: a sentence for each served model, in their order; empty if other processes have the models.
    ``about_key``: lines about the generated key.
    """
    is_open = config.auth_mode == "open"
    origin = "see above" if about_key else "twinkle-server keys create"
    key = "tml-local" if is_open else f"tml-… ({origin})"
    lines = [f"note: {note}" for note in notes]
    for number, served in enumerate(config.served_models):
        others = f" (also {', '.join(served.aliases)})" if served.aliases else ""
        lines += [f"serving {served.name}{others}", *(f"  {each}" for each in memory[number : number + 1])]
    if not config.served_models:
        lines.append("serving no model: nothing can be trained or sampled here")
    lines += [
        f"{LISTENING} {url}  (Tinker protocol under /api/v1, OpenAI's under /v1, Anthropic's under /anthropic)",
        f"dashboard: {url}/dashboard",
        f"routes of the API: {url}/docs",
        f"data in {config.data_dir}",
        f"keys: {'any key that begins with tml- is a tenant of its own' if is_open else 'required'}",
        *(f"  {line}" for line in about_key),
        "connect:",
        *(f"  {line}" for line in _with_the_sdk(config.served_models[:1], url, key)),
        f'  client = twinkle_client.init_twinkle_client("{url}")  # its second argument is the key',
    ]
    return "\n".join(lines)


def _with_the_sdk(served: Sequence[ServedModelConfig], url: str, key: str) -> list[str]:
    """Return code that creates a training client of Tinker's SDK for a served model; only a client if there is none."""
    if served and served[0].model.train_mode == "full":
        return [
            f'twinkle_client.init_tinker_client("{url}", "{key}")  # adds create_full_training_client to the SDK',
            f'training = tinker.ServiceClient().create_full_training_client("{served[0].name}")',
        ]
    return [
        f'service = tinker.ServiceClient(base_url="{url}", api_key="{key}")',
        *(f'training = service.create_lora_training_client(base_model="{each.name}")' for each in served),
    ]
