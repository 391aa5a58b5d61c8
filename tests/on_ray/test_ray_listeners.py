"""A server with its own Ray cluster: none of its processes listens on the network or connects to it.

A client on this machine needs the token, unless the operator disables it; then the log has a warning.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

from tests.support.servers.running import Server, Tenant, mock_config

pytestmark = pytest.mark.ray

_LISTENING = "0A"
_HERE = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


_CLIENT_SECONDS = 60  # for a client that is admitted or refused; both take about 10 seconds
# Without this variable Ray's client replaces 127.0.0.1 by the network's address, where nothing listens. That would
# prove nothing.
_CLIENT_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_CLIENT = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
print("it ran", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote()))
"""


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers with no settings for Ray except ``variables``, as in a new user's shell.

    The variables that conftest.py sets for clusters of other tests would hide whether a server sets them itself.
    """
    servers: list[Server] = []

    def start(**variables: str) -> Server:
        home = tmp_path_factory.mktemp("listeners")
        config = mock_config(runtime="ray")
        config["applications"].append({"name": "processor", "import_path": "processor"})
        with pytest.MonkeyPatch.context() as patch:
            _forget_ray(patch, home)
            for name, value in variables.items():
                patch.setenv(name, value)
            servers.append(Server(home, config))
            return servers[-1].start()

    yield start
    codes = [server.stop() for server in servers if server.process is not None and server.process.poll() is None]
    assert set(codes) <= {0}


@pytest.fixture(scope="module")
def server(own_server: Callable[..., Server]) -> Server:
    return own_server()


def _forget_ray(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Remove all of Ray's variables, and the token of this machine's user, from the environment."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        patch.delenv(name)
    patch.setenv("HOME", str(home))


def address_of(server: Server) -> str:
    """Return the address of a server's cluster, which must be on this machine."""
    found = re.search(r"the Ray cluster at (\S+), one of its own", server.log())
    assert found is not None, server.log()
    assert found[1].startswith("127.0.0.1:")
    return found[1]


def client(server: Server, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Connect to the cluster's ports with no settings except ``variables``, and return the finished client process."""
    with pytest.MonkeyPatch.context() as patch:
        _forget_ray(patch, home)
        return subprocess.run(
            [sys.executable, "-c", _CLIENT, address_of(server)],
            env={**os.environ, **_CLIENT_ON_LOOPBACK, **variables},
            capture_output=True,
            text=True,
            timeout=_CLIENT_SECONDS,
        )


def processes(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes(int(child))


def sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def connections(inodes: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield local address, remote address and state of TCP sockets, as the kernel writes them."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                yield fields[1], fields[2], fields[3]


def test_everything_listens_on_this_machine_alone(server: Server) -> None:
    tenant = Tenant(server.url, "tml-a")
    tenant.result(tenant.forward_backward(tenant.model(), 1))
    assert server.process is not None
    names, listeners = set(), 0
    for pid in processes(server.process.pid):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        names.add(name)
        for local, remote, state in connections(sockets(pid)):
            listeners += state == _LISTENING
            assert local.startswith(_HERE), f"{name}: {local}"
            assert state == _LISTENING or remote.startswith(_HERE), f"{name}: {remote}"
    assert {"raylet", "gcs_server"} <= names
    assert listeners > 10
    assert "asks for no token" not in server.log()


def test_without_the_token_nobody_runs_anything(server: Server, tmp_path: Path) -> None:
    token = (server.directory / ".ray" / "auth_token").read_text()
    assert "it ran 42" in client(server, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).stdout
    refused = client(server, tmp_path, RAY_AUTH_MODE="disabled")
    assert refused.returncode != 0
    assert "it ran" not in refused.stdout
    assert "token" in refused.stderr


def test_an_operator_who_wants_no_token_is_warned(own_server: Callable[..., Server]) -> None:
    open_to_all = own_server(RAY_AUTH_MODE="disabled")
    assert "this Ray cluster asks for no token" in open_to_all.log()
    assert not (open_to_all.directory / ".ray" / "auth_token").exists()
