"""What an owner can do with checkpoints, and what others can do with public ones."""

import time
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.support.servers.running import Server, Tenant, datum
from tests.support.servers.state_samples import checkpoint, run, session, with_store
from twinkle.server.gateway.checkpoint_actions import CheckpointActions
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool

ROW = [datum(range(8))]


def trained(tenant: Tenant, **more: object) -> tuple[str, str, float]:
    """Train a model; return it, a checkpoint of it, and the checkpoint's loss on a row."""
    model = tenant.model(**more)
    tenant.forward_backward(model, 1)
    tenant.optim_step(model, 2)
    path = tenant.json(tenant.save(model, 3, "ck", user_metadata={"kept": "yes"}))["path"]
    return model, path, tenant.loss(tenant.forward_backward(model, 4, ROW, forward_only=True))


def loss_from(tenant: Tenant, path: str, optimizer: bool = True) -> float:
    """Load the checkpoint into a new model and return its loss."""
    model = tenant.model()
    tenant.json(tenant.load(model, 1, path, optimizer))
    return tenant.loss(tenant.forward_backward(model, 2, ROW, forward_only=True))


def place(path: str) -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{checkpoint}"


def listed(tenant: Tenant, path: str) -> dict[str, object]:
    (found,) = [each for each in tenant.get("checkpoints").json()["checkpoints"] if each["tinker_path"] == path]
    return dict(found)


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_expiry_is_set_and_removed(tenant: Tenant) -> None:
    _, path, _ = trained(tenant)
    assert listed(tenant, path)["expires_at"] is None
    assert listed(tenant, path)["user_metadata"] == {"kept": "yes"}
    assert tenant.http.put(f"{place(path)}/ttl", json={"ttl_seconds": 7200}).status_code == 200
    expires = datetime.fromisoformat(str(listed(tenant, path)["expires_at"]))
    assert expires.tzinfo is not None
    assert 7100 < expires.timestamp() - time.time() <= 7200
    assert tenant.http.put(f"{place(path)}/ttl", json={"ttl_seconds": None}).status_code == 200
    assert listed(tenant, path)["expires_at"] is None


@pytest.mark.parametrize(
    "body", [{}, {"ttl_seconds": 0}, {"ttl_seconds": -5}, {"ttl_seconds": "1"}, {"ttl_seconds": 10**9}]
)
def test_expiries_that_are_refused(tenant: Tenant, body: dict[str, object]) -> None:
    _, path, _ = trained(tenant)
    answer = tenant.http.put(f"{place(path)}/ttl", json=body)
    assert (answer.status_code, "ttl_seconds" in answer.json()["detail"]) == (400, True)


def test_what_has_expired_is_not_there(tenant: Tenant) -> None:
    _, path, _ = trained(tenant)
    tenant.http.put(f"{place(path)}/ttl", json={"ttl_seconds": 1})
    time.sleep(1.1)
    for answer in (
        tenant.post("weights_info", {"tinker_path": path}),
        tenant.http.put(f"{place(path)}/ttl", json={"ttl_seconds": 1000}),
        tenant.post(f"{place(path)}/publish", {}),
        tenant.post("copy_weights", {"source_path": path, "destination_project_id": "p"}),
    ):
        assert answer.status_code == 404, answer.text


def test_overwriting_makes_another_checkpoint(tenant: Tenant) -> None:
    """The new checkpoint does not inherit who may read it or when it expires."""
    model, path, _ = trained(tenant)
    assert tenant.post(f"{place(path)}/publish", {}).is_success
    assert "exists" in tenant.error(tenant.save(model, 5, "ck"))
    assert tenant.json(tenant.save(model, 6, "ck", overwrite=True, ttl_seconds=5000))["path"] == path
    again = listed(tenant, path)
    assert (again["public"], again["user_metadata"], again["expires_at"] is None) == (False, {}, False)


# --- publishing -------------------------------------------------------------------------------------------------------


def test_public_checkpoints_are_read_by_all(tenant: Tenant, other_tenant: Tenant) -> None:
    model, path, loss = trained(tenant)
    sampler = tenant.json(tenant.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "s"}))[
        "path"
    ]
    assert other_tenant.post("weights_info", {"tinker_path": path}).status_code == 404
    for address in (path, sampler):
        assert tenant.post(f"{place(address)}/publish", {}).status_code == 200
        assert listed(tenant, address)["public"] is True
    info = other_tenant.post("weights_info", {"tinker_path": path}).json()
    assert (info["base_model"], info["lora_rank"]) == ("mock", 8)
    assert loss_from(other_tenant, path) == loss
    sampling = {"session_id": other_tenant.session(), "sampling_session_seq_id": 0, "model_path": sampler}
    made = other_tenant.post("create_sampling_session", sampling).json()["sampling_session_id"]
    assert len(other_tenant.tokens(other_tenant.sample(made))) == 12
    # Others may only read it: they cannot list, change or delete it, and the run stays its owner's.
    assert other_tenant.get("checkpoints").json()["checkpoints"] == []
    for answer in (
        other_tenant.http.put(f"{place(path)}/ttl", json={"ttl_seconds": 1}),
        other_tenant.http.delete(f"{place(path)}/publish"),
        other_tenant.http.delete(place(path)),
        other_tenant.get(f"training_runs/{model}"),
    ):
        assert answer.status_code == 404
    assert tenant.http.delete(f"{place(path)}/publish").status_code == 200
    assert other_tenant.post("weights_info", {"tinker_path": path}).status_code == 404
    assert "unknown checkpoint" in other_tenant.error(other_tenant.load(other_tenant.model(), 1, path))


# --- copies -----------------------------------------------------------------------------------------------------------


def copy(tenant: Tenant, key: str | None = None, **body: object) -> httpx.Response:
    return tenant.post("copy_weights", body, **({} if key is None else {"X-Idempotency-Key": key}))


def test_a_copy_into_a_project(tenant: Tenant) -> None:
    _, path, loss = trained(tenant)
    answer = copy(tenant, "key", source_path=path, destination_project_id="p", ttl_seconds=5000)
    copied = answer.json()["tinker_path"]
    assert copied != path
    assert copied.endswith("/weights/ck")
    assert copy(tenant, "key", source_path=path, destination_project_id="p", ttl_seconds=5000).json() == answer.json()
    assert copy(tenant, "other", source_path=path, destination_project_id="p").json() != answer.json()
    found = listed(tenant, copied)
    assert (found["size_bytes"], found["user_metadata"]) == (listed(tenant, path)["size_bytes"], {"kept": "yes"})
    assert found["expires_at"] is not None
    run = copied.removeprefix("tinker://").partition("/")[0]
    runs = tenant.get("training_runs", project_id="p").json()["training_runs"]
    assert run in [each["training_run_id"] for each in runs]
    assert tenant.http.delete(place(path)).is_success
    assert loss_from(tenant, copied) == loss  # it has the optimizer state and does not need its source
    wrong = copy(tenant, "key", source_path=copied, destination_project_id="p")
    assert (wrong.status_code, "Idempotency" in wrong.json()["detail"]) == (400, True)


def test_a_copy_into_a_session(tenant: Tenant) -> None:
    model, path, loss = trained(tenant)
    session = tenant.session()
    body = {"source_path": path, "session_id": session, "model_seq_id": 4}
    copied = copy(tenant, **body).json()["tinker_path"]
    assert copied == f"tinker://{session}:train:4/weights/ck"
    assert copy(tenant, **body).json()["tinker_path"] == copied
    assert loss_from(tenant, copied) == loss
    assert tenant.get(f"sessions/{session}").json()["training_run_ids"] == [f"{session}:train:4"]
    # The run only holds checkpoints and cannot train; its number is taken.
    assert "copies of checkpoints" in tenant.error(tenant.forward_backward(f"{session}:train:4", 1))
    create = {"session_id": session, "model_seq_id": 4, "base_model": "mock", "lora_config": {"rank": 8, "seed": 1}}
    assert "model_seq_id 4 is in use" in tenant.error(tenant.submit("create_model", create))
    tenant.model(session, 5)
    for taken in (5, 4):
        source = path if taken == 5 else tenant.json(tenant.save(model, 5, "ck", overwrite=True))["path"]
        answer = copy(tenant, source_path=source, session_id=session, model_seq_id=taken)
        assert answer.status_code == 400, answer.text


def test_a_copy_of_anothers(tenant: Tenant, other_tenant: Tenant) -> None:
    """The owner's notes about the checkpoint are not copied."""
    _, path, loss = trained(tenant)
    tenant.post(f"{place(path)}/publish", {})
    copied = copy(other_tenant, source_path=path, destination_project_id="mine").json()["tinker_path"]
    tenant.http.delete(place(path))
    assert loss_from(other_tenant, copied) == loss
    found = listed(other_tenant, copied)
    assert (found["public"], found["user_metadata"]) == (False, {})
    assert tenant.post("weights_info", {"tinker_path": copied}).status_code == 404


def test_copies_that_are_refused(tenant: Tenant) -> None:
    model, path, _ = trained(tenant)
    session = tenant.session()
    exported = tenant.json(tenant.submit("save_weights_external", {"model_id": model, "seq_id": 5, "path": "e"}))[
        "path"
    ]
    project = {"destination_project_id": "p"}
    for named, body in (
        ("destination", {"source_path": path}),
        ("destination_project_id", {"source_path": path, "session_id": session, "model_seq_id": 1, **project}),
        ("model_seq_id", {"source_path": path, "session_id": session}),
        ("destination", {"source_path": path, "model_seq_id": 1, **project}),
        ("source_path", {"source_path": exported, **project}),
        ("source_path", {"source_path": "weights/ck", **project}),
        ("weights_access_token", {"source_path": path, "weights_access_token": "t", **project}),
        ("ttl_seconds", {"source_path": path, "ttl_seconds": 0, **project}),
    ):
        answer = copy(tenant, **body)
        assert (answer.status_code, named in answer.json()["detail"]) == (400, True), (body, answer.text)
    token = {"X-Tinker-Weights-Access-Token": "t"}
    assert tenant.post("copy_weights", {"source_path": path, **project}, **token).status_code == 400
    assert tenant.get("training_runs", project_id="p").json()["training_runs"] == []


# --- models created from a checkpoint ---------------------------------------------------------------------------------


def begin(
    tenant: Tenant, session: str, path: str, number: int = 0, optimizer: bool = True, **more: object
) -> httpx.Response:
    body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": optimizer, **more}
    return tenant.post("load_weights", body)


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_model_that_begins_as_a_checkpoint(tenant: Tenant, optimizer: bool) -> None:
    """It equals a model made by create_model and load_weights."""
    _, path, loss = trained(tenant, rank=4)
    session = tenant.session()
    answer = begin(tenant, session, path, optimizer=optimizer, user_metadata={"renderer": "r"}).json()
    model = f"{session}:train:0"
    assert answer["model_id"] == model
    assert tenant.json(answer["request_id"]) == {"path": path, "model_id": model, "type": "load_weights"}
    usual = tenant.model(tenant.session(), rank=4)
    tenant.json(tenant.load(usual, 1, path, optimizer))
    results = []
    for one, first in ((model, 1), (usual, 2)):
        requests = [
            tenant.forward_backward(one, first, ROW),
            tenant.optim_step(one, first + 1),
            tenant.forward_backward(one, first + 2, ROW),
        ]
        results.append([tenant.result(request) for request in requests])
    assert results[0] == results[1]
    assert tenant.loss(f"{model}:1") == loss
    run = tenant.get(f"training_runs/{model}").json()
    assert (run["base_model"], run["lora_rank"], run["user_metadata"]) == ("mock", 4, {"renderer": "r"})


def test_asked_twice_it_begins_once(tenant: Tenant) -> None:
    model, path, _ = trained(tenant)
    session = tenant.session()
    first = begin(tenant, session, path).json()
    tenant.json(first["request_id"])
    tenant.json(tenant.optim_step(first["model_id"], 1))
    tenant.http.delete(place(path))
    assert begin(tenant, session, path).json() == first
    other = begin(tenant, session, path, optimizer=False).json()
    assert "used before with another request" in tenant.error(other["request_id"])
    assert model in str(tenant.get("training_runs").json())


def test_beginnings_that_are_refused(tenant: Tenant) -> None:
    model, path, _ = trained(tenant)
    sampler = tenant.json(tenant.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "s"}))[
        "path"
    ]
    session = tenant.session()
    for named, answer in (
        ("optimizer", begin(tenant, session, sampler)),
        ("base_model", begin(tenant, session, path, base_model="unknown")),
        ("weights_access_token", begin(tenant, session, path, weights_access_token="t")),
        ("dimuon", begin(tenant, session, path, optimizer_config={"type": "dimuon"})),
        ("path", begin(tenant, session, "ck")),
        ("model_seq_id", begin(tenant, session, path, number=-1)),
    ):
        assert (answer.status_code, named in answer.json()["detail"]) == (400, True), answer.text
    assert begin(tenant, session, path.replace("/ck", "/none")).status_code == 404
    assert begin(tenant, session, path, number=3, base_model="mock:peft:1024").status_code == 200
    assert begin(tenant, session, sampler, number=4, optimizer=False).status_code == 200
    token = {"model_id": model, "seq_id": 6, "path": path, "optimizer": True, "weights_access_token": "t"}
    assert "weights_access_token" in tenant.error(tenant.submit("load_weights", token))


def test_files_that_cannot_be_read_make_no_model(tenant: Tenant, server: Server) -> None:
    """Ops that wait for the model get an error."""
    model, path, _ = trained(tenant)
    (directory,) = server.data_dir.glob(f"checkpoints/{model.replace(':', '-')}/weights/ck/*")
    (directory / "adapter.npz").write_bytes(b"damaged")
    answer = begin(tenant, tenant.session(), path).json()
    message = tenant.error(answer["request_id"])
    assert path in message
    assert str(server.data_dir) not in message
    assert tenant.error(tenant.forward_backward(answer["model_id"], 1))
    assert tenant.get(f"training_runs/{answer['model_id']}").json()["corrupted"] is True


def test_what_a_crash_left_of_a_deleted_checkpoint_goes_with_the_next_maintenance(tmp_path: Path) -> None:
    """The process may die after the record was marked as deleted, or after some of the files were deleted."""

    async def check(store: Store) -> None:
        await store.sessions.create(session("s1"))
        await store.runs.add(run(1))
        record = checkpoint()
        await store.checkpoints.add(record)
        directory = tmp_path / record.directory
        directory.mkdir(parents=True)
        (directory / "weights").touch()
        await store.checkpoints.begin_delete(record)  # the process dies here
        actions = CheckpointActions(store, DataDir(tmp_path), FairPool("saving", threads=1, at_once=1))
        await actions.delete_expired(time.time())
        assert not directory.exists()
        assert await store.checkpoints.get(record.run_id, record.kind, record.name) is None

    with_store(tmp_path, check)
