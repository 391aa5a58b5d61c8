"""The audit log: its content, who may read it, and for how long it is kept."""

import time
from datetime import datetime

import pytest

from tests.support.servers.running import Tenant
from tests.support.servers.state_samples import checkpoint, delete_checkpoint, run, session, with_store
from twinkle.server.state.store import Store


def events(tenant: Tenant, **query: object) -> list[str]:
    answer = tenant.get("audit", **query)
    assert answer.status_code == 200, answer.text
    return [entry["event"] for entry in answer.json()["entries"]]


def test_what_a_tenant_did(tenant: Tenant, other_tenant: Tenant) -> None:
    session_id = tenant.session()
    model = tenant.model(session_id)
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    place = f"training_runs/{model}/checkpoints/weights/ck"
    tenant.json(tenant.save(model, 2, "ck", overwrite=True))
    for _ in range(2):  # a repeated change is logged only once
        assert tenant.post(f"{place}/publish", {}).is_success
    assert tenant.http.put(f"{place}/ttl", json={"ttl_seconds": 5000}).is_success
    assert tenant.http.delete(f"{place}/publish").is_success
    assert tenant.http.put(f"sessions/{session_id}/project", json={"project_id": "p"}).is_success
    assert tenant.http.delete(place).is_success
    finished = {"reason": {"type": "success"}, "detail": None}
    assert tenant.post(f"sessions/{session_id}/finish", finished).is_success
    checkpoints = [
        "checkpoint_save",
        "checkpoint_save",
        "checkpoint_publish",
        "checkpoint_set_ttl",
        "checkpoint_unpublish",
        "checkpoint_delete",
        "checkpoint_save",  # the adapter's last state, saved when its session ends
    ]
    told = events(tenant)
    assert [event for event in told if event.startswith("checkpoint")] == checkpoints
    assert [event for event in told if not event.startswith("checkpoint")] == [
        "session_create",
        "project_assign",
        "session_finish",
    ]
    assert events(tenant, event_type="checkpoints") == checkpoints
    assert events(tenant, event_type="projects") == ["project_assign"]
    assert events(tenant, event_type="teams") == events(other_tenant) == []
    entry = tenant.get("audit", event_type="checkpoints").json()["entries"][2]
    assert (entry["tinker_path"], entry["model_id"], entry["event_details"]["public"]) == (path, model, 1)
    assert abs(datetime.fromisoformat(entry["timestamp"]).timestamp() - time.time()) < 60


def test_by_day(tenant: Tenant) -> None:
    tenant.session()
    (entry,) = tenant.get("audit").json()["entries"]
    assert events(tenant, day=entry["timestamp"][:10]) == ["session_create"]
    assert events(tenant, day="2020-01-01") == []
    for wrong in ({"day": "yesterday"}, {"event_type": "mistakes"}):
        assert tenant.get("audit", **wrong).status_code == 400


@pytest.mark.usefixtures("backend")
def test_old_entries_are_dropped(tmp_path) -> None:
    async def check(store: Store) -> None:
        for number in range(6):
            await store.sessions.create(session(f"s{number}", created_at=100.0 + number))
        await store.sessions.create(session("b", tenant_id="bob", created_at=50.0))
        await store.audit.prune(before=101.0)
        assert [e.details["session_id"] for e in await store.audit.list("alice", 0, 1e9, 10)] == [
            f"s{n}" for n in range(1, 6)
        ]
        assert await store.audit.list("bob", 0, 1e9, 10) == []
        await store.audit.prune(before=0.0, most=2)
        assert [entry.at for entry in await store.audit.list("alice", 0, 1e9, 10)] == [104.0, 105.0]
        assert [entry.at for entry in await store.audit.list("alice", 0, 105.0, 1)] == [104.0]

    with_store(tmp_path, check)


@pytest.mark.usefixtures("backend")
def test_an_entry_is_there_with_what_it_tells_of(tmp_path) -> None:
    async def check(store: Store) -> None:
        await store.sessions.create(session("s1"))
        await store.runs.add(run(1))
        await store.checkpoints.add(checkpoint())
        await store.checkpoints.add(checkpoint())  # as when an op runs again after a crash
        await store.checkpoints.begin_delete(checkpoint(), "checkpoint_expire")
        await delete_checkpoint(store, checkpoint())  # as in the next maintenance after a crash
        assert await store.sessions.end("s1", "expired", 200.0)
        assert not await store.sessions.end("s1", "finished", 300.0, "success")
        told = [entry.event for entry in await store.audit.list("alice", 0, 1e12, 10)]
        assert sorted(told) == sorted(["session_create", "checkpoint_save", "checkpoint_expire", "session_expire"])

    with_store(tmp_path, check)
