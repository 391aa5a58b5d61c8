"""Finding sessions: lists, searches, projects, and the reasons why they ended."""

import itertools
from collections.abc import Mapping

import pytest

from tests.support.servers.running import Tenant


def make(tenant: Tenant, **fields: object) -> str:
    answer = tenant.post("create_session", {"tags": [], **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["session_id"])


def finish(tenant: Tenant, session: str, reason: str, detail: str | None = None) -> None:
    body = {"reason": {"type": reason}, "detail": detail}
    assert tenant.post(f"sessions/{session}/finish", body).status_code == 200


def search(tenant: Tenant, **wanted: object) -> list[dict[str, object]]:
    answer = tenant.post("sessions/search", wanted)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["sessions"])


def ids(found: list[dict[str, object]]) -> list[object]:
    return [session["session_id"] for session in found]


def test_listed_newest_first_in_pages(tenant: Tenant) -> None:
    made = [make(tenant) for _ in range(5)][::-1]
    assert tenant.get("sessions").json()["sessions"] == made
    page = tenant.get("sessions", limit=2, offset=1, access_scope="accessible").json()
    assert page["sessions"] == made[1:3]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}
    for wrong in ({"limit": 0}, {"offset": -1}, {"access_scope": "all"}):
        assert tenant.get("sessions", **wrong).status_code == 400


def test_the_first_reason_stands(tenant: Tenant) -> None:
    session = make(tenant, display_name="d", project_id="p", user_metadata={"k": "v"})
    assert search(tenant)[0]["status"] == {"type": "active"}
    finish(tenant, session, "errored", "out of patience")
    finish(tenant, session, "success", "after all")
    (found,) = search(tenant)
    reason = {"type": "errored"}
    assert found["status"] == {"type": "client_finished", "reason": reason, "detail": "out of patience"}
    assert (found["display_name"], found["project_id"], found["user_metadata"]) == ("d", "p", {"k": "v"})
    wrong = tenant.post(f"sessions/{session}/finish", {"reason": {"type": "bored"}, "detail": None})
    assert (wrong.status_code, "reason.type" in wrong.json()["detail"]) == (400, True)


@pytest.fixture
def four(tenant: Tenant) -> Mapping[str, str]:
    """Four sessions with different names, projects and metadata."""
    made = {
        "plain": make(tenant),
        "blue": make(tenant, display_name="Deep BLUE run", project_id="p1", user_metadata={"a": "1", "b": "2"}),
        "red": make(tenant, display_name="red run", project_id="p2", user_metadata={"a": "1", "n": 3}),
        "done": make(tenant, display_name="done", project_id="p1"),
    }
    finish(tenant, made["done"], "interrupted")
    return made


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, "done red blue plain"),
        ({"project_ids": ["p1"]}, "done blue"),
        ({"project_ids": ["p2", "p1"]}, "done red blue"),
        ({"project_ids": []}, ""),
        ({"user_metadata": {"a": "1"}}, "red blue"),
        ({"user_metadata": {"a": "1", "b": "2"}}, "blue"),
        ({"user_metadata": {"n": "3"}}, "red"),
        ({"display_name": "run"}, "red blue"),
        ({"display_name": "run blue"}, "blue"),
        ({"statuses": [{"type": "active"}]}, "red blue plain"),
        ({"statuses": [{"type": "client_finished"}]}, "done"),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, ""),
        ({"statuses": [{"type": "failed"}, {"type": "cancelled"}]}, ""),
        (
            {"statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["interrupted"]}]},
            "done red blue plain",
        ),
        ({"owner": {"type": "accessible"}, "project_ids": ["p1"], "display_name": "deep"}, "blue"),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, ""),
    ],
)
def test_searching(tenant: Tenant, four: Mapping[str, str], wanted: dict[str, object], expected: str) -> None:
    assert ids(search(tenant, **wanted)) == [four[name] for name in expected.split()]


def test_by_id_or_name(tenant: Tenant, four: Mapping[str, str]) -> None:
    assert ids(search(tenant, session_id=four["plain"])) == [four["plain"]]
    assert ids(search(tenant, session_id=four["plain"], display_name="red")) == [four["red"], four["plain"]]
    owner = search(tenant)[0]["owner"]
    assert len(search(tenant, owner={"type": "user", "owner_urns": [owner]})) == 4


def test_pages_of_a_search(tenant: Tenant, other_tenant: Tenant) -> None:
    made = [make(tenant, display_name=f"number {n}") for n in range(7)][::-1]
    foreign = make(other_tenant)
    found, cursor = [], None
    for _ in itertools.count():
        body = {"limit": 3, "display_name": "number"} | ({} if cursor is None else {"cursor": cursor})
        page = tenant.post("sessions/search", body).json()
        found += ids(page["sessions"])
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    assert found == made
    good = tenant.post("sessions/search", {"limit": 3}).json()["next_cursor"]
    for wrong in (
        {"last_session_id": foreign},
        {"last_session_id": "s-unknown"},
        {"last_created_at": "2020-01-01T00:00:00Z"},
    ):
        answer = tenant.post("sessions/search", {"cursor": {**good, **wrong}})
        assert (answer.status_code, "next_cursor" in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"limit": 201}, "limit"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "sleeping"}]}, "statuses[0].type"),
        ({"display_name": ""}, "display_name"),
        ({"user_metadata": {"a": 1}}, "user_metadata.a"),
        ({"owner": {"type": "user"}}, "owner.owner_urns"),
        ({"cursor": {"last_session_id": "s", "last_created_at": "2020-01-01T00:00:00"}}, "cursor.last_created_at"),
    ],
)
def test_searches_that_are_refused(tenant: Tenant, body: dict[str, object], named: str) -> None:
    answer = tenant.post("sessions/search", body)
    assert (answer.status_code, named in answer.json()["detail"]) == (400, True), answer.text


def test_checkpoints_are_counted(tenant: Tenant) -> None:
    session = tenant.session()
    model = tenant.model(session)
    sizes = []
    for seq, name in enumerate(("a", "b"), start=1):
        tenant.json(tenant.save(model, seq, name))
    sizes = [each["size_bytes"] for each in tenant.get("checkpoints").json()["checkpoints"]]
    (found,) = search(tenant, session_id=session)
    assert (found["checkpoints_count"], found["checkpoint_storage_bytes"]) == (2, sum(sizes))


def test_a_session_moves_to_another_project(tenant: Tenant) -> None:
    session = make(tenant, project_id="old")
    model = tenant.model(session)
    assert tenant.http.put(f"sessions/{session}/project", json={"project_id": "new"}).status_code == 200
    assert ids(search(tenant, project_ids=["new"])) == [session]
    runs = {
        project: tenant.get("training_runs", project_id=project).json()["training_runs"] for project in ("old", "new")
    }
    assert [run["training_run_id"] for run in runs["new"]] == [model]
    assert runs["old"] == []
    for wrong in ({}, {"project_id": ""}, {"project_id": None}):
        assert tenant.http.put(f"sessions/{session}/project", json=wrong).status_code == 400
