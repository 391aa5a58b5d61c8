"""Copies of checkpoints count towards the disk quota, however many are requested at once."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.tenancy.test_limits import at_once
from tests.support.servers.running import Server, Tenant, key_for, mock_config
from twinkle.server.state.files.data_dir import size_of


def saved(tenant: Tenant) -> tuple[str, int]:
    """Save a checkpoint; return its path and size."""
    model = tenant.model()
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    (listed,) = tenant.get("checkpoints").json()["checkpoints"]
    return path, listed["size_bytes"]


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for two and a half checkpoints."""
    directory = tmp_path_factory.mktemp("tight")
    server = Server(directory).start()
    _, size = saved(Tenant(server.url, key_for("measures")))
    assert server.stop() == 0
    server.configure(mock_config(limits={"max_checkpoint_bytes_per_tenant": size * 5 // 2}))
    server.start()
    yield server
    server.close()


def on_disk(server: Server, name: str = "ck") -> int:
    return sum(size_of(place) for place in server.data_dir.glob(f"checkpoints/*/weights/{name}"))


def test_of_two_copies_at_once_one_fits(tight: Server) -> None:
    tenant = Tenant(tight.url, key_for("two at once"))
    path, size = saved(tenant)
    before = on_disk(tight)
    bodies: list[dict[str, Any] | bytes] = [
        {"source_path": path, "destination_project_id": project} for project in ("p", "q")
    ]
    answers = sorted(at_once(tenant, "copy_weights", bodies), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 400], [answer.text for answer in answers]
    assert "max_checkpoint_bytes_per_tenant" in answers[1].json()["detail"]
    assert {each["tinker_path"] for each in tenant.get("checkpoints").json()["checkpoints"]} == {
        path,
        answers[0].json()["tinker_path"],
    }
    assert on_disk(tight) == before + size  # the refused copy left nothing behind


def test_the_same_copy_twice_at_once_is_one(tight: Server) -> None:
    tenant = Tenant(tight.url, key_for("the same twice"))
    path, size = saved(tenant)
    before = on_disk(tight)
    body: dict[str, Any] = {"source_path": path, "session_id": tenant.session(), "model_seq_id": 4}
    answers = at_once(tenant, "copy_weights", [dict(body) for _ in range(4)])
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["tinker_path"] for answer in answers}) == 1
    assert on_disk(tight) == before + size


def test_a_tenant_without_room_copies_nothing(tight: Server) -> None:
    tenant = Tenant(tight.url, key_for("no room"))
    path, _ = saved(tenant)
    body = {"source_path": path, "destination_project_id": "p"}
    first = tenant.post("copy_weights", body, **{"X-Idempotency-Key": "first"})
    assert first.status_code == 200
    before = on_disk(tight)
    assert tenant.post("copy_weights", body).status_code == 400
    assert on_disk(tight) == before
    # Repeating the request for an existing copy costs nothing.
    assert tenant.post("copy_weights", body, **{"X-Idempotency-Key": "first"}).json() == first.json()
