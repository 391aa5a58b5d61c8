"""``train_mode: full`` on the mock: one run at a time holds the model, through both protocols and over restarts.

tests/clients/all_parameters has the same with a real model, the SDK and the client.
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.servers.native_caller import Caller
from tests.support.servers.running import MODEL, Server, Tenant, datum, mock_config
from twinkle.server.wire import tinker_pb2 as pb

DATA = [datum([3, 5, 8, 13])]
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
BUSY = re.compile(
    r"mock is served with train_mode: full, where one run at a time trains all parameters, and it has been held since "
    rf"{TIME}\. It is free when its holder unloads it, or after {TIME} if its holder stays silent until then"
)


def config(**sections: Any) -> dict[str, Any]:
    content = mock_config(**sections)
    content["applications"][1]["args"]["train_mode"] = "full"
    return content


def create(tenant: Tenant, number: int = 0, session: str | None = None, **fields: Any) -> tuple[str, str]:
    """Ask for a model without a LoRA configuration; return its id and the id of the request."""
    session = session or tenant.session()
    body = {"session_id": session, "model_seq_id": number, "base_model": MODEL, "type": "create_model", **fields}
    return f"{session}:train:{number}", tenant.submit("create_model", body)


def model(tenant: Tenant) -> str:
    model_id, request_id = create(tenant)
    assert tenant.json(request_id)["model_id"] == model_id
    return model_id


def step(tenant: Tenant, model_id: str, seq: int) -> float:
    """Train one step; return the loss before it."""
    loss = tenant.loss(tenant.forward_backward(model_id, seq, DATA))
    tenant.json(tenant.optim_step(model_id, seq + 1))
    return loss


def native(server: Server, token: str) -> Caller:
    caller = Caller(server.url, token)
    caller.begin()
    return caller


def add(caller: Caller, name: str = "policy", **fields: Any) -> httpx.Response:
    body = {"adapter_name": name, **fields}
    return caller.http.post(f"model/{MODEL}/twinkle/add_adapter_to_model", json=body)


def verb(caller: Caller, called: str, **fields: Any) -> Any:
    answer = caller.http.post(f"model/{MODEL}/twinkle/{called}", json={"adapter_name": "policy", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def unload(tenant: Tenant, model_id: str) -> None:
    tenant.json(tenant.submit("unload_model", {"model_id": model_id}))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(tmp_path_factory.mktemp("full"), config(), housekeeping=0.2).start()
    yield server
    server.close()


@pytest.fixture
def first(full: Server, request: pytest.FixtureRequest) -> Any:
    """A tenant that gives the model back at the end of the test."""
    tenant = Tenant(full.url, f"tml-first-{request.node.name}")
    yield tenant
    for run in tenant.get("twinkle/adapters").json()["adapters"]:
        if run["where"] not in ("parked", "failed"):
            session = run["session_id"]
            assert tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 200


# --- Tinker's protocol ------------------------------------------------------------------------------------------------


def test_a_run_trains_all_parameters_and_begins_with_the_base_model(full: Server, first: Tenant) -> None:
    mine = model(first)
    info = first.post("get_info", {"model_id": mine}).json()
    assert info["is_lora"] is False
    assert info["lora_rank"] is None
    before, after = step(first, mine, 1), step(first, mine, 3)
    assert after < before
    saved = first.json(first.save(mine, 5, "a"))["path"]
    weights = first.post("weights_info", {"tinker_path": saved}).json()
    assert (weights["is_lora"], weights["lora_rank"], weights["train_mlp"]) == (False, None, None)
    assert first.get(f"training_runs/{mine}").json()["is_lora"] is False
    unload(first, mine)
    again = model(first)
    assert step(first, again, 1) == before  # the weights of the base model, not those of the run before


def test_a_second_tenant_waits_until_the_first_has_left(full: Server, first: Tenant) -> None:
    mine = model(first)
    base = step(first, mine, 1)
    other = Tenant(full.url, "tml-second")
    other_id, request_id = create(other)
    refusal = other.error(request_id)
    assert BUSY.fullmatch(refusal), refusal
    session = mine.partition(":")[0]
    assert not any(word in refusal for word in (session, first.key, "first", str(info_of(first)["model_owner"])))
    caller = native(full, "tml-third")
    answer = add(caller)
    assert answer.status_code == 409
    assert BUSY.fullmatch(answer.json()["detail"])
    assert other.post("forward_backward", b"").status_code == 400  # the refusals changed nothing
    assert step(first, mine, 3) < base
    unload(first, mine)
    theirs_id, request_id = create(other, 1, other_id.partition(":")[0])
    other.json(request_id)
    assert step(other, theirs_id, 1) == base
    unload(other, theirs_id)


def info_of(tenant: Tenant) -> dict[str, Any]:
    run: dict[str, Any] = tenant.get("training_runs").json()["training_runs"][0]
    return run


def test_what_is_trained_must_be_what_the_model_is_served_for(full: Server, first: Tenant, tenant: Tenant) -> None:
    _, request_id = create(first, lora_config={"rank": 8})
    assert "lora_config: got a LoRA configuration, allowed: null: mock is served with train_mode: full" in first.error(
        request_id
    )
    caller = native(full, "tml-config")
    answer = add(caller, config={"r": 8, "target_modules": "all-linear"})
    assert answer.status_code == 400
    assert "config: got a LoRA configuration, allowed: null" in answer.json()["detail"]
    # The shared server trains adapters.
    _, request_id = create(tenant)
    assert "lora_config: got null, allowed: a LoRA configuration: mock is served with train_mode: lora" in tenant.error(
        request_id
    )


def test_the_same_request_again_gets_the_same_run(full: Server, first: Tenant) -> None:
    session = first.session()
    mine, request_id = create(first, 0, session)
    again, same = create(first, 0, session)
    assert (again, same) == (mine, request_id)
    assert first.json(same)["model_id"] == mine


def test_one_of_several_requests_at_the_same_moment_gets_the_model(full: Server) -> None:
    tenants = [Tenant(full.url, f"tml-rush-{number}") for number in range(4)]
    sessions = [tenant.session() for tenant in tenants]
    with ThreadPoolExecutor(len(tenants)) as pool:
        made = list(pool.map(lambda tenant, session: create(tenant, 0, session), tenants, sessions))
    answers = [tenant.result(request_id) for tenant, (_, request_id) in zip(tenants, made, strict=True)]
    (winner,) = [number for number, answer in enumerate(answers) if b"error" not in answer]
    assert all(BUSY.search(answer.decode()) for number, answer in enumerate(answers) if number != winner)
    unload(tenants[winner], made[winner][0])


def test_checkpoints_of_a_run_are_its_tenants_alone(full: Server, first: Tenant) -> None:
    mine = model(first)
    step(first, mine, 1)
    saved = first.json(first.save(mine, 3, "mine"))["path"]
    body = {"model_id": mine, "seq_id": 4, "path": "mine"}
    version = first.json(first.submit("save_weights_for_sampler", body))["path"]
    unload(first, mine)
    other = Tenant(full.url, "tml-stranger")
    theirs, request_id = create(other)
    other.json(request_id)
    base = other.loss(other.forward_backward(theirs, 1, DATA))
    assert "unknown checkpoint" in other.error(other.load(theirs, 2, saved))
    session, run = theirs.partition(":")[0], version.split("/")[2]
    for number, path in enumerate((saved, version)):
        body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
        assert other.post("create_sampling_session", body).status_code == 404
    assert other.http.delete(f"training_runs/{run}/checkpoints/sampler_weights/mine").status_code == 404
    assert other.loss(other.forward_backward(theirs, 3, DATA)) == base
    unload(other, theirs)
    session = first.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": version}
    sampling = first.post("create_sampling_session", body).json()["sampling_session_id"]
    drawn = logprobs(first, sampling)
    assert first.http.delete(f"training_runs/{run}/checkpoints/sampler_weights/mine").status_code == 200
    assert logprobs(first, sampling, 1) == drawn  # a version never changes, even if its checkpoint is deleted


def test_a_checkpoint_is_loaded_and_a_new_run_begins_with_it(full: Server, first: Tenant) -> None:
    mine = model(first)
    step(first, mine, 1)
    saved = first.json(first.save(mine, 3, "later"))["path"]
    expected = step(first, mine, 4)
    first.json(first.load(mine, 6, saved))
    assert step(first, mine, 7) == expected
    session = mine.partition(":")[0]
    body = {"session_id": session, "model_seq_id": 7, "path": saved, "optimizer": True, "type": "load_weights"}
    assert BUSY.search(first.error(first.submit("load_weights", body)))
    unload(first, mine)
    body["model_seq_id"] = 8
    first.json(first.submit("load_weights", body))
    assert step(first, f"{session}:train:8", 1) == expected


def test_samples_come_from_versions_and_the_base_model_stays(full: Server, first: Tenant) -> None:
    mine = model(first)
    step(first, mine, 1)
    session = mine.partition(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    base = first.post("create_sampling_session", body).json()["sampling_session_id"]
    drawn = logprobs(first, base)
    version = first.json(first.publish(mine, 3, 1))["sampling_session_id"]
    trained = logprobs(first, version)
    assert trained != drawn
    assert logprobs(first, base, 1) == drawn
    step(first, mine, 4)
    assert logprobs(first, version, 1) == trained  # a version never changes
    unload(first, mine)
    assert logprobs(first, base, 2) == drawn
    assert logprobs(first, version, 2) == trained


def logprobs(tenant: Tenant, sampling_session: str, number: int = 0) -> list[float]:
    response = pb.SampleResponse.FromString(tenant.result(tenant.sample(sampling_session, number)))
    return np.frombuffer(response.sequences[0].logprobs, "<f4").tolist()


# --- the native protocol ----------------------------------------------------------------------------------------------

ROWS = [{"input_ids": [3, 5, 8, 13], "labels": [5, 8, 13, -100]}]


def losses(caller: Caller, count: int) -> list[float]:
    return [verb(caller, "forward_backward", inputs=ROWS)["result"]["loss"] for _ in range(count)]


def test_native_verbs_and_a_fresh_replica_after_them(full: Server) -> None:
    """The optimizer, the schedule, the loss, the metrics and the template of a run leave with it."""
    caller = native(full, "tml-native")
    assert add(caller, gradient_accumulation_steps=2).status_code == 200
    assert add(caller, gradient_accumulation_steps=2).status_code == 200  # one's own name again
    verb(caller, "set_optimizer", optimizer_cls="Adam", lr=0.1)
    verb(caller, "set_lr_scheduler", scheduler_cls="LinearLR", start_factor=0.5, total_iters=4)
    verb(caller, "set_loss", loss_cls="CrossEntropyLoss", reduction="mean")
    first, second = losses(caller, 2)
    assert first == second  # both are in one window
    verb(caller, "step")
    verb(caller, "lr_step")
    (third,) = losses(caller, 1)
    assert third < first
    assert "parameters" in verb(caller, "get_train_configs")["result"]
    assert len(verb(caller, "get_state_dict")["result"]["w"]) == 8
    assert "loss" in verb(caller, "calculate_metric", is_training=True)["result"]
    saved = verb(caller, "save", name="kept", save_optimizer=True)["twinkle_path"]
    assert caller.http.post(f"model/{MODEL}/twinkle/remove_adapter", json={"adapter_name": "policy"}).status_code == 200
    caller = native(full, "tml-native")
    assert add(caller).status_code == 200
    answer = caller.http.post(f"model/{MODEL}/twinkle/step", json={"adapter_name": "policy"})
    assert answer.status_code == 400  # no optimizer
    assert "set_optimizer" in answer.json()["detail"]
    described = verb(caller, "get_train_configs")["result"]
    assert "optimizer: none" in described
    assert "gradient accumulation steps: 1" in described
    assert losses(caller, 1)[0] == pytest.approx(3 * first, rel=1e-6)  # the default loss is the sum of three targets
    verb(caller, "zero_grad")
    verb(caller, "set_optimizer", optimizer_cls="Adam", lr=0.1)
    verb(caller, "set_lr_scheduler", scheduler_cls="LinearLR", start_factor=0.5, total_iters=4)
    progress = verb(caller, "resume_from_checkpoint", name=saved)["result"]
    assert progress["cur_step"] == 3
    assert losses(caller, 1)[0] == pytest.approx(3 * third, rel=1e-6)  # its weights are back, too
    assert caller.http.post(f"model/{MODEL}/twinkle/remove_adapter", json={"adapter_name": "policy"}).status_code == 200


def test_nobody_computes_with_the_weights_of_another_run(full: Server, first: Tenant) -> None:
    """A pass of the base model would have the weights of whoever trains them."""
    model(first)
    caller = native(full, "tml-curious")
    answer = caller.http.post(f"model/{MODEL}/twinkle/forward_only", json={"inputs": ROWS})
    assert answer.status_code == 400
    assert "served with train_mode: full" in answer.json()["detail"]


# --- time, restarts and other modes -----------------------------------------------------------------------------------


def test_the_hold_survives_a_kill_and_ends_with_silence(own_server: Callable[..., Server]) -> None:
    server = own_server(config(limits={"session_timeout_seconds": 3.0}), housekeeping=0.2)
    mine, others = Tenant(server.url, "tml-mine"), Tenant(server.url, "tml-others")
    held = model(mine)
    base = step(mine, held, 1)
    expected = mine.loss(mine.forward_backward(held, 3, DATA))
    server.kill()
    server.start()
    waiting = others.session()
    assert BUSY.search(others.error(create(others, 0, waiting)[1]))
    assert mine.json(mine.optim_step(held, 4))["metrics"]  # the run goes on
    deadline = time.monotonic() + 60
    number = 1
    while True:
        others.post("session_heartbeat", {"session_id": waiting})
        theirs, request_id = create(others, number, waiting)
        answer = others.result(request_id)
        if b"error" not in answer:
            break
        assert time.monotonic() < deadline, answer
        number, _ = number + 1, time.sleep(0.2)
    assert step(others, theirs, 1) == base
    note = mine.error(mine.optim_step(held, 5))
    assert "its weights and its optimizer's state are kept for 7 days" in note
    unload(others, theirs)
    path = note.partition("_with_optimizer('")[2].partition("'")[0]
    session = mine.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True, "type": "load_weights"}
    mine.json(mine.submit("load_weights", body))
    assert step(mine, f"{session}:train:0", 1) < expected


def test_a_run_that_cannot_be_saved_leaves_when_it_can(own_server: Callable[..., Server]) -> None:
    """Its last state is not lost, and the model is free again without a restart."""
    server = own_server(config(), housekeeping=0.2)
    mine, others = Tenant(server.url, "tml-unsaved"), Tenant(server.url, "tml-waiting")
    held = model(mine)
    base = step(mine, held, 1)
    expected = mine.loss(mine.forward_backward(held, 3, DATA))
    in_the_way = server.data_dir / "checkpoints" / held.replace(":", "-")
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.touch()
    session = held.partition(":")[0]
    assert mine.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 200
    waiting = others.session()
    assert "A holder has left" in others.error(create(others, 0, waiting)[1])
    in_the_way.unlink()
    number, deadline = 1, time.monotonic() + 60
    while b"error" in (answer := others.result(create(others, number, waiting)[1])):
        assert time.monotonic() < deadline, answer
        number, _ = number + 1, time.sleep(0.2)
    theirs = f"{waiting}:train:{number}"
    assert step(others, theirs, 1) == base
    unload(others, theirs)
    session = mine.session()
    path = f"tinker://{held}/weights/parked"
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True, "type": "load_weights"}
    mine.json(mine.submit("load_weights", body))
    assert step(mine, f"{session}:train:0", 1) == expected


def test_a_tenant_takes_over_from_its_own_silent_session(own_server: Callable[..., Server]) -> None:
    """A script that died and is started again need not wait for the end of its old session."""
    server = own_server(config(limits={"silent_session_seconds": 0.5}), housekeeping=0.2)
    tenant = Tenant(server.url, "tml-restarted")
    model(tenant)
    session, number = tenant.session(), 0
    deadline = time.monotonic() + 60
    while b"error" in (answer := tenant.result(create(tenant, number, session)[1])):
        assert time.monotonic() < deadline, answer
        number, _ = number + 1, time.sleep(0.2)


def test_runs_of_the_other_mode_wait_until_it_is_back(own_server: Callable[..., Server]) -> None:
    server = own_server(None)
    tenant = Tenant(server.url, "tml-modes")
    adapter = tenant.model()
    expected = tenant.loss(tenant.forward_backward(adapter, 1, DATA))
    saved = tenant.json(tenant.save(adapter, 2, "adapter"))["path"]
    server.stop()
    server.configure(config())
    server.start()
    assert f"cannot go on while {MODEL} is served with train_mode: full" in tenant.error(tenant.optim_step(adapter, 3))
    held = model(tenant)
    assert "allowed: a checkpoint of all parameters" in tenant.error(tenant.load(held, 1, saved))
    step(tenant, held, 2)
    saved = tenant.json(tenant.save(held, 4, "full"))["path"]
    server.stop()
    server.configure(mock_config())
    server.start()
    tenant.json(tenant.optim_step(adapter, 3))
    assert tenant.loss(tenant.forward_backward(adapter, 4, DATA)) < expected
    assert "allowed: a checkpoint of an adapter" in tenant.error(tenant.load(adapter, 5, saved))
    assert "train_mode: lora" in tenant.error(tenant.optim_step(held, 5))
