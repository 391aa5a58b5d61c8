"""Rows of ended sessions are deleted, so that endlessly creating and finishing sessions does not fill the disk."""

import json
from pathlib import Path

import pytest

from tests.support.servers.running import MODEL, Server, Tenant, mock_config
from tests.support.servers.state_samples import (
    checkpoint,
    delete_checkpoint,
    query,
    run,
    sampling_session,
    session,
    with_store,
)
from twinkle.errors import QuotaError
from twinkle.server.state.store import Store
from twinkle.server.types import MeasuredStep

HOUR = 3600.0


def kept(data_dir: Path) -> dict[str, list[str]]:
    tables = {"sessions": "session_id", "runs": "run_id", "sampling_sessions": "sampling_session_id"}
    return {
        name: sorted(row[0] for row in query(data_dir, f"SELECT {key} FROM {name}")) for name, key in tables.items()
    }


async def fill(store: Store) -> None:
    """Add sessions: active; ended without anything, with a run and a checkpoint, with samplers; and just ended."""
    for number, name in enumerate(("active", "empty", "saved", "samplers")):
        await store.sessions.create(session(name, last_seen=100.0 + number))
        await store.runs.add(run(1, name, state="parked"))
        await store.run_metrics.add_steps([MeasuredStep(f"{name}:train:1", 1, 100.0, {"loss": 1.0})])
        await store.run_metrics.log(f"{name}:train:1", 1, {"mine": 2.0}, 100.0)
    await store.checkpoints.add(checkpoint(run_id="saved:train:1"))
    base = {"version_id": None, "directory": None, "model_path": None}
    await store.sampling_sessions.create(sampling_session(1, "active", **base))
    await store.sampling_sessions.create(sampling_session(1, "samplers", **base))
    await store.sampling_sessions.join("samplers:sample:1")
    unnamed = {"version_id": "samplers:sample:2", "directory": "samplers/2"}
    await store.sampling_sessions.create(sampling_session(2, "samplers", **unnamed))
    pinned = {"version_id": "saved:train:1/final", "directory": "saved:train:1/final"}
    await store.sampling_sessions.create(sampling_session(3, "samplers", **pinned))
    for name in ("empty", "saved", "samplers"):
        await store.sessions.end(name, "finished", 200.0)
    await store.sessions.create(session("young", last_seen=5000.0))
    await store.sessions.end("young", "finished", 5000.0)


@pytest.mark.usefixtures("backend")
def test_what_is_old_goes_and_what_has_files_stays(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        await fill(store)
        assert await store.retention.delete_ended(50.0) == 0
        assert await store.retention.delete_ended(1000.0) > 0
        assert kept(tmp_path) == {
            "sessions": ["active", "samplers", "saved", "young"],
            "runs": ["active:train:1", "saved:train:1"],
            "sampling_sessions": ["active:sample:1", "samplers:sample:2"],
        }
        assert await store.retention.delete_ended(1000.0) == 0
        # Once the files are gone, their rows can be deleted.
        await store.sampling_sessions.delete("samplers:sample:2")
        saved = await store.checkpoints.get("saved:train:1", "weights", "final")
        assert saved is not None
        await delete_checkpoint(store, saved)
        await store.retention.delete_ended(1000.0)
        assert kept(tmp_path)["sessions"] == ["active", "young"]
        assert query(tmp_path, "SELECT DISTINCT run_id FROM run_metrics") == [("active:train:1",)]
        assert query(tmp_path, "SELECT DISTINCT run_id FROM run_metric_names") == [("active:train:1",)]

    with_store(tmp_path, check)


@pytest.mark.usefixtures("backend")
def test_a_tenant_makes_room_only_from_its_own(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        for number in range(3):
            for tenant in ("alice", "bob"):
                await store.sessions.create(session(f"{tenant}{number}", tenant, last_seen=100.0 + number))
                await store.sessions.end(f"{tenant}{number}", "finished", 200.0)
        with pytest.raises(QuotaError, match=r"3 of 3 in use \(max_session_rows_per_tenant\).*delete checkpoints"):
            await store.sessions.create(session("alice3"), most_rows=3)
        assert await store.retention.make_room("alice", 200.0) == 0, "all of them may be in use"
        assert await store.retention.make_room("alice", 102.0 + HOUR) == 2
        await store.sessions.create(session("alice3"), most_rows=3)
        assert kept(tmp_path)["sessions"] == ["alice2", "alice3", "bob0", "bob1", "bob2"]

    with_store(tmp_path, check)


def test_curves_of_a_tenant_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.server.state.records.run_metrics.MAX_POINTS_OF_TENANT", 600)

    async def check(store: Store) -> None:
        await store.sessions.create(session())
        for number in range(1, 5):
            await store.runs.add(run(number, state="parked", last_request_at=100.0 + number))
            for point in range(256):
                await store.run_metrics.log(f"s1:train:{number}", point, {"x": 1.0}, 100.0)
        counts = dict(query(tmp_path, "SELECT run_id, COUNT(*) FROM run_metrics GROUP BY run_id"))
        assert counts == {"s1:train:3": 256, "s1:train:4": 256}, "those of the longest idle runs went"

    with_store(tmp_path, check)


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("tags", ["x" * 300], "at most 256"),
        ("tags", ["x"] * 101, "100 tags"),
        ("tags", ["é" * 200] * 20, "8192 bytes"),
        ("user_metadata", {"x": "y" * 20_000}, "16384 bytes"),
        ("project_id", "p" * 300, "at most 256"),
        ("display_name", "n" * 2000, "at most 1024"),
    ],
)
def test_what_a_session_brings_is_small(tenant: Tenant, field: str, value: object, allowed: str) -> None:
    answer = tenant.post("create_session", {field: value})
    assert answer.status_code == 400
    assert field in answer.text
    assert allowed in answer.text


def test_a_long_traceback_is_no_mistake(tenant: Tenant) -> None:
    name = tenant.session()
    finished = {"reason": {"type": "errored"}, "detail": "x" * 60_000}
    assert tenant.post(f"sessions/{name}/finish", finished).status_code == 200
    found = tenant.post("sessions/search", {"session_id": name}).json()["sessions"]
    assert len(found[0]["status"]["detail"]) == 4096


def test_creating_and_finishing_for_ever(own_server) -> None:
    """The file stops growing, sessions with a checkpoint stay, and an honest tenant is not affected."""
    limits = {"ended_session_retention_seconds": 0.2, "max_session_rows_per_tenant": 40, "parked_adapter_seconds": 1e6}
    server: Server = own_server(mock_config(limits=limits), housekeeping=0.1)
    honest, busy = Tenant(server.url, "tml-honest"), Tenant(server.url, "tml-busy")
    model = honest.model()
    path = honest.json(honest.save(model, 1, "mine"))["path"]
    metadata = {"x": "y" * 16_000}
    sizes = []
    for _ in range(4):
        for _ in range(60):
            answer = busy.post("create_session", {"user_metadata": metadata, "tags": ["t" * 200] * 30})
            if answer.status_code == 429:
                assert "max_session_rows_per_tenant" in answer.json()["detail"]
                continue
            name = answer.json()["session_id"]
            sampler = {"session_id": name, "sampling_session_seq_id": 0, "base_model": MODEL}
            assert busy.post("create_sampling_session", sampler).status_code == 200
            busy.post(f"sessions/{name}/finish", {"reason": {"type": "success"}, "detail": "d" * 60_000})
        sizes.append((server.data_dir / "state.db").stat().st_size)
    assert sizes[-1] < 40 * 60_000, sizes
    assert json.loads(honest.get("checkpoints").content)["checkpoints"][0]["tinker_path"] == path
    honest.post(f"sessions/{model.partition(':')[0]}/finish", {"reason": {"type": "success"}, "detail": None})
    assert honest.json(honest.load(honest.model(), 1, path))
