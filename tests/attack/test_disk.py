"""A flipped bit in one tenant's journal, and a full disk, each with a restart: everybody else goes on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confined import ConfinedServer
from running import Tenant, environment, mock_config

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
    content[content.rindex(models[0].encode() if kind == "bodies" else results[0])] ^= 1  # in what alice sent, or got
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
    """F10: the files with all that alice sent and got are gone; bob came after a restart and has files of his own."""
    server = confined_server(snapshot=3600.0)
    alice, bob, carol = (Tenant(server.url, f"tml-deleted-{name}") for name in ("alice", "bob", "carol"))
    lost = alice.model(seed=1)
    request = alice.forward_backward(lost, 1)
    alice.json(alice.optim_step(lost, 2))  # by now the result of 1 is written down
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("nobody but root mounts a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_server_and_its_commands_start_on_a_full_disk(
    confined_server: Callable[..., ConfinedServer], small_disk: Path
) -> None:
    server = confined_server(mock_config(data_dir=str(small_disk / "data")))
    tenant = Tenant(server.url, "tml-full")
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1))
    server.kill()
    assert (small_disk / "data" / "reserve").exists()
    with (small_disk / "filler").open("wb") as filler:
        try:
            while True:
                filler.write(bytes(65536))
                filler.flush()
        except OSError:
            pass
    free = os.statvfs(small_disk)
    assert free.f_bavail * free.f_frsize < 65536
    create = server.command("keys", "create", "-c", str(server.directory / "config.yaml"))
    made = subprocess.run(create, check=False, capture_output=True, text=True, env=environment())
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("tml-")
    server.start()
    tenant.result(tenant.forward_backward(model, 2))
