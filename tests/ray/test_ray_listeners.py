"""A server on a Ray cluster of its own: nothing that it starts listens to the network, or talks to it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[1] / "server"))
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

from running import Server, Tenant, mock_config

pytestmark = pytest.mark.ray

_LISTENING = "0A"
_HERE = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = mock_config(runtime="ray")
    config["applications"].append({"name": "processor", "import_path": "processor"})
    running = Server(tmp_path_factory.mktemp("listeners"), config).start()
    yield running
    assert running.stop() == 0


def processes(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes(int(child))


def sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def connections(inodes: set[str]) -> Iterator[tuple[str, str, str]]:
    """Local address, remote address and state of TCP sockets, as the kernel writes them."""
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
