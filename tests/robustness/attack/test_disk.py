"""A flipped bit in one tenant's journal, or a full disk, and a restart: all other tenants continue."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.robustness.attack.confined import ConfinedServer
from tests.support.servers.running import Tenant, environment, mock_config, training_body

pytestmark = pytest.mark.attack


@pytest.mark.parametrize("kind", ["bodies", "outcomes"])
def test_one_bit_of_one_tenant_costs_nobody_else(confined_server: Callable[..., ConfinedServer], kind: str) -> None:
    server = confined_server(snapshot=3600.0)
    tenants = [Tenant(server.url, f"tml-disk-{name}") for name in ("alice", "bob")]
    models = [tenant.model(seed=seed) for seed, tenant in enumerate(tenants)]
    requests = [tenant.forward_backward(model, 1) for tenant, model in zip(tenants, models, strict=True)]
    results = [tenant.result(request) for tenant, request in zip(tenants, requests, strict=True)]
    server.kill()
    segment = next((server.data_dir / "journal" / kind).glob("*.journal"))
    content = bytearray(segment.read_bytes())
    assert results[0] != results[1]
    # in a request of alice, or in her result
    content[content.rindex(models[0].encode() if kind == "bodies" else results[0])] ^= 1
    segment.write_bytes(content)
    server.start()
    alice, bob = tenants
    assert bob.result(requests[1]) == results[1]
    bob.json(bob.optim_step(models[1], 2))
    said = alice.result(requests[0]).decode(errors="replace")
    later = alice.result(alice.optim_step(models[0], 2)).decode(errors="replace")
    assert "damaged" in (later if kind == "bodies" else said)
    assert "damaged" in server.log()


def test_a_deleted_segment_costs_its_tenant_alone(confined_server: Callable[..., ConfinedServer]) -> None:
    """The files with all requests and results of alice are gone. Bob came after a restart, so he has other files."""
    server = confined_server(snapshot=3600.0)
    alice, bob, carol = (Tenant(server.url, f"tml-deleted-{name}") for name in ("alice", "bob", "carol"))
    lost = alice.model(seed=1)
    request = alice.forward_backward(lost, 1)
    alice.json(alice.optim_step(lost, 2))  # by now the result of op 1 is in the journal
    server.kill()
    old = list((server.data_dir / "journal").glob("*/*.journal"))
    server.start()
    kept = bob.model(seed=2)
    bob.result(bob.forward_backward(kept, 1))
    server.kill()
    for segment in old:
        segment.unlink()
    server.start()
    same = carol.model(seed=2)
    carol.result(carol.forward_backward(same, 1))
    for tenant, model in ((bob, kept), (carol, same)):
        tenant.json(tenant.optim_step(model, 2))
    assert bob.result(bob.forward_backward(kept, 3)) == carol.result(carol.forward_backward(same, 3))
    assert b"damaged" in alice.result(request)
    assert b"damaged" in alice.result(alice.optim_step(lost, 3))
    assert f"damaged: request {lost}:" in server.log()


@dataclass(frozen=True)
class KilledServer:
    """What a killed server left behind: its data, and an adapter with one pass."""

    data_dir: Path
    key: str
    model: str


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> KilledServer:
    server = ConfinedServer(tmp_path_factory.mktemp("killed")).confine()
    try:
        server.start()
        tenant = Tenant(server.url, "tml-full")
        model = tenant.model()
        tenant.result(tenant.forward_backward(model, 1))
    finally:
        server.close()
    return KilledServer(server.data_dir, tenant.key, model)


@pytest.fixture
def full_disk(tmp_path: Path, killed: KilledServer) -> Iterator[Path]:
    """A file system with the data of the killed server and not a single free byte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("nobody but root mounts a file system")
    try:
        shutil.copytree(killed.data_dir, disk / "data")
        fill(disk)
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0


@pytest.mark.parametrize(
    "command", [("keys", "create"), ("clear", "persistence", "--yes"), ("check-data",)], ids=lambda words: words[0]
)
def test_commands_run_on_a_full_disk(tmp_path: Path, full_disk: Path, command: tuple[str, ...]) -> None:
    """Each of these commands writes before it reads."""
    server = ConfinedServer(tmp_path, mock_config(data_dir=str(full_disk / "data")))
    arguments = server.command(*command, "-c", str(tmp_path / "config.yaml"))
    ended = subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment())
    assert ended.returncode == 0, ended.stderr
    said = {"keys": "tml-", "clear": "cleared ", "check-data": f"{full_disk / 'data'}: nothing is damaged"}
    assert ended.stdout.startswith(said[command[0]])


def test_a_server_starts_on_a_full_disk(
    confined_server: Callable[..., ConfinedServer], killed: KilledServer, full_disk: Path
) -> None:
    """Interrupted work continues."""
    server = confined_server(mock_config(data_dir=str(full_disk / "data")))
    tenant = Tenant(server.url, killed.key)
    assert tenant.loss(tenant.forward_backward(killed.model, 2)) > 0


def test_a_server_without_a_reserve_starts_on_a_full_disk(
    confined_server: Callable[..., ConfinedServer], killed: KilledServer, full_disk: Path
) -> None:
    """The reserved disk space was used up before. The server logs what it could not write, and works later."""
    (full_disk / "data" / "reserve").unlink()
    fill(full_disk)
    server = confined_server(mock_config(data_dir=str(full_disk / "data")))
    assert "may expire" in server.log()
    tenant = Tenant(server.url, killed.key)
    refused = tenant.post("forward_backward", training_body(killed.model, 2))
    assert refused.status_code == 507, refused.text
    (full_disk / "filler").unlink()
    assert tenant.loss(tenant.forward_backward(killed.model, 2)) > 0
