"""Native verbs on a server that is killed, and repeated and invalid requests. With the mock model every loss shows."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, key_for, mock_config


@pytest.fixture
def native(server: Server, request: pytest.FixtureRequest) -> NativeTenant:
    return NativeTenant(server.url, key_for(request.node.nodeid), MODEL)


def rows(seed: int, count: int = 2) -> list[dict[str, list[int]]]:
    return [{"input_ids": [seed + i, 5, 9, 2 * seed + 1], "labels": [5, 9, 2 * seed + 1, -100]} for i in range(count)]


def set_up(tenant: NativeTenant, name: str = "a", **options: int) -> str:
    run = tenant.add_adapter(name, seed=1, **options)
    tenant.verb("set_optimizer", adapter_name=name, optimizer_cls="AdamW", lr=0.05)
    tenant.verb("set_lr_scheduler", adapter_name=name, scheduler_cls="LinearLR", start_factor=0.5, total_iters=6)
    return run


def step(tenant: NativeTenant, seed: int, name: str = "a") -> float:
    loss = tenant.verb("forward_backward", adapter_name=name, inputs=rows(seed))["loss"]
    tenant.verb("clip_grad_and_step", adapter_name=name)
    return float(loss)


# --- numbers and repeats ----------------------------------------------------------------------------------------------


def test_a_number_used_again_gets_the_first_answer(native):
    native.add_adapter("a", seed=1)
    native.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05, seq_id=1)
    body = {"adapter_name": "a", "inputs": rows(3), "seq_id": 2}
    first = native.verb("forward_backward", **body)
    assert native.verb("forward_backward", **body) == first
    native.verb("clip_grad_and_step", adapter_name="a", seq_id=3)
    native.verb("clip_grad_and_step", adapter_name="a", seq_id=3)
    after = native.verb("get_state_dict", adapter_name="a", seq_id=4)
    assert native.verb("forward_backward", **body) == first
    assert native.verb("get_state_dict", adapter_name="a", seq_id=5) == after
    assert "seq_id 2" in native.refusal("forward_backward", 409, **{**body, "inputs": rows(4)})
    assert "seq_id 2" in native.refusal("forward_only", 409, **body), "the same body, but another verb"


def test_requests_with_numbers_run_in_their_order(native):
    native.add_adapter("a", seed=1)

    def ask(number: int, verb: str, **body: object) -> object:
        return native.verb(verb, adapter_name="a", seq_id=number, **body)

    with ThreadPoolExecutor(4) as pool:
        step_ = pool.submit(ask, 3, "clip_grad_and_step")
        trained = pool.submit(ask, 2, "forward_backward", inputs=rows(1))
        time.sleep(0.2)
        assert not step_.done()
        assert not trained.done()
        pool.submit(ask, 1, "set_optimizer", optimizer_cls="Adam", lr=0.1).result()
        assert trained.result()["loss"] > 0
        step_.result()


def test_a_request_cannot_say_what_only_the_journal_says(native):
    native.add_adapter("forger")
    told = native.refusal("step", **{"adapter_name": "forger", "\x00refused": "never ran"})
    assert told == "body: '\\x00refused' is no argument of step"


def test_a_refused_request_takes_its_place_in_the_sequence(native):
    native.add_adapter("a", seed=1)
    assert "loss_cls" in native.refusal("set_loss", adapter_name="a", seq_id=1)
    assert "inputs" in native.refusal("forward_backward", adapter_name="a", inputs=[], seq_id=2)
    native.verb("forward_only", adapter_name="a", inputs=rows(1), seq_id=3)


def test_an_adapter_is_added_once(native):
    run = native.add_adapter("a", seed=1)
    assert native.add_adapter("a", seed=1) == run
    for modules in (["k_proj", "q_proj"], ["q_proj", "k_proj"]):  # a set has no order
        native.verb("add_adapter_to_model", adapter_name="b", config={"r": 4, "target_modules": modules})
    config = json.dumps({"r": 8, "target_modules": "all-linear"})
    assert "another request" in native.refusal("add_adapter_to_model", adapter_name="a", config=config)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body", "said"),
    [
        ("forward_backward", {"inputs": []}, "inputs"),
        ("forward_backward", {"inputs": "text"}, "inputs"),
        ("forward_backward", {"inputs": [{"input_ids": []}]}, "inputs[0].input_ids"),
        ("forward_backward", {"inputs": [{"input_ids": ["a"]}]}, "inputs[0].input_ids"),
        ("forward_backward", {"inputs": [{"input_ids": [1, 2, 3], "labels": [1, 2]}]}, "inputs[0].labels"),
        ("forward_backward", {"inputs": [{"input_ids": [1, 2], "labels": [1]}]}, "inputs.labels"),
        ("forward_backward", {"inputs": [{"input_ids": [1], "pixel_values": [[1.0]]}]}, "pixel_values"),
        ("forward_backward", {"inputs": [{"input_ids": [1]}, {"messages": []}]}, "not both"),
        ("forward_backward", {"inputs": [{"input_ids": [10**9], "labels": [1]}]}, "token ids"),
        ("forward_backward", {"inputs": rows(1), "nonsense": 1}, "nonsense"),
        ("forward_backward", {"inputs": rows(1), "temperature": 0}, "temperature"),
        ("forward_backward", {"inputs": rows(1), "temperature": "warm"}, "temperature"),
        ("forward_backward", {"inputs": rows(1), "training": True}, "training"),
        ("forward_backward", {"inputs": [{"messages": [{"role": "user", "content": "hi"}]}]}, "tokenizer"),
        ("forward_only", {"inputs": rows(1), "return_logits": True}, "logits"),
        ("backward", {}, "forward"),
        ("backward", {"inputs": 3}, "inputs"),
        ("step", {}, "set_optimizer"),
        ("step", {"lr": 3}, "lr"),
        ("set_loss", {"loss_cls": "NoSuchLoss"}, "NoSuchLoss"),
        ("set_loss", {"loss_cls": "hf://somebody/code"}, "hf://somebody/code"),
        ("set_loss", {"loss_cls": "__import__('os')"}, "__import__"),
        ("set_loss", {"loss_cls": "DPOLoss", "alpha": 1}, "alpha"),
        ("set_loss", {}, "loss_cls"),
        ("set_optimizer", {"optimizer_cls": "LBFGS"}, "SGD"),
        ("set_optimizer", {"optimizer_cls": "SGD", "momentum": -1}, "momentum"),
        ("set_optimizer", {"optimizer_cls": "RMSprop", "momentum": 0.9, "centered": True}, "one of them"),
        ("set_optimizer", {"optimizer_cls": "Muon", "ns_steps": 10**9}, "less than 100"),
        ("set_optimizer", {"optimizer_cls": "AdamW", "lr": "fast"}, "lr"),
        ("set_lr_scheduler", {"scheduler_cls": "LinearLR"}, "set_optimizer"),
        ("set_processor", {"processor_cls": "InputProcessor", "padding_side": "up"}, "padding_side"),
        ("add_metric", {"metric_cls": "Nothing"}, "Nothing"),
        ("apply_patch", {"patch_cls": "X"}, "apply_patch"),
        ("save", {"name": "a", "is_sampler": True, "save_optimizer": True}, "save_optimizer"),
        ("save", {"name": "a", "where": "/tmp"}, "where"),
        ("load", {"name": "/etc"}, "allowed_dirs"),
        ("load", {"name": "org/model"}, "allowed_dirs"),
        ("load", {"name": "twinkle://other-run/weights/x"}, "twinkle://"),
        ("resume_from_checkpoint", {"name": "../../x"}, "allowed_dirs"),
        ("no_such_verb", {}, "no_such_verb"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(native, verb, body, said):
    native.add_adapter("a", seed=1)
    before = native.verb("get_state_dict", adapter_name="a")
    answer = native.post(verb, adapter_name="a", **body)
    assert answer.status_code in (400, 404), answer.text
    assert said in answer.json()["detail"]
    assert native.verb("get_state_dict", adapter_name="a") == before
    assert native.verb("forward_backward", adapter_name="a", inputs=rows(1))["loss"] > 0


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"adapter_name": "../x"}, 400, "adapter_name"),
        ({"adapter_name": "a" * 65}, 400, "adapter_name"),
        ({"config": "not json"}, 400, "config"),
        ({"config": "[1]"}, 400, "config"),
        ({"config": '{"_TWINKLE_TYPE_": "DatasetMeta"}'}, 400, "LoraConfig"),
        ({"config": '{"r": 0, "target_modules": "all-linear"}'}, 400, "r"),
        ({"config": '{"r": 100000, "target_modules": "all-linear"}'}, 400, "100000"),
        ({"config": '{"use_dora": true, "target_modules": "all-linear"}'}, 400, "use_dora"),
        ({"save_dir": "/tmp"}, 400, "allowed_dirs"),
        ({"gradient_accumulation_steps": 0}, 400, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": "two"}, 400, "gradient_accumulation_steps"),
        ({"color": "red"}, 400, "color"),
    ],
)
def test_adapters_that_cannot_be(native, change, status, said):
    body = {"adapter_name": "a", "config": '{"r": 4, "target_modules": "all-linear"}', **change}
    assert said in native.refusal("add_adapter_to_model", status, **body)
    native.add_adapter("a", seed=1)


def test_who_asks_and_for_what(server, native):
    native.add_adapter("a")
    url = f"{server.url}/api/v1/model/{MODEL}/twinkle/step"
    body = {"adapter_name": "a"}
    assert httpx.post(url, json=body).status_code == 401
    no_session = httpx.post(url, json=body, headers={"Authorization": native.http.headers["Authorization"]})
    assert no_session.status_code == 400
    assert "X-Twinkle-Session-Id" in no_session.json()["detail"]
    assert native.http.post("/api/v1/model/other/twinkle/create").status_code == 404
    assert native.http.post("/api/v1/model/other/twinkle/step", json=body).status_code == 404
    assert native.http.post(f"/api/v1/model/{MODEL}/twinkle/step", content=b"{").status_code == 400
    assert native.http.post(f"/api/v1/model/{MODEL}/twinkle/step", content=b"[]").status_code == 400
    deep = b'{"adapter_name":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert native.http.post(f"/api/v1/model/{MODEL}/twinkle/step", content=deep).status_code == 400


def test_a_refused_evaluation_leaves_the_way_back_open(native):
    set_up(native)
    native.verb("forward", adapter_name="a", inputs=rows(1))
    native.verb("calculate_loss", adapter_name="a")
    native.refusal("forward_only", adapter_name="a", inputs=[{"input_ids": [10**9], "labels": [1]}])
    native.verb("backward", adapter_name="a")
    assert native.verb("clip_grad_and_step", adapter_name="a") > 0


def test_verbs_without_a_result_answer_null(native):
    native.add_adapter("a", seed=1, gradient_accumulation_steps=2)

    def content(verb: str, **body: object) -> object:
        answer = native.post(verb, adapter_name="a", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert content("set_loss", loss_cls="CrossEntropyLoss") is None
    assert content("set_optimizer", optimizer_cls="AdamW", lr=0.05) is None
    assert content("set_lr_scheduler", scheduler_cls="LinearLR") is None
    assert content("set_processor", processor_cls="InputProcessor") is None
    path = content("save", name="ck", save_optimizer=True)["twinkle_path"]
    assert content("add_metric", metric_cls="LossMetric") is None
    assert content("forward", inputs=rows(1))["result"]["logps"]
    assert content("calculate_loss")["result"] > 0
    assert content("backward") is None
    for verb in ("step", "zero_grad", "lr_step"):
        assert content(verb) is None
    assert content("clip_grad_and_step") is None  # in an open window there is no norm
    assert content("load", name=path) is None
    assert content("resume_from_checkpoint", name=path)["result"]["cur_step"] == 0


def test_micro_batches_are_the_servers_own_choice(native):
    set_up(native)
    losses = []
    for options in ({}, {"micro_batch_size": 1}):
        losses.append(native.verb("forward_backward", adapter_name="a", inputs=rows(3), **options)["loss"])
        native.verb("zero_grad", adapter_name="a")
    assert losses[0] == losses[1]
    native.verb("forward_only", adapter_name="a", inputs=rows(3), micro_batch_size=1)
    for wrong in (0, "x", [1]):
        told = native.refusal("forward_backward", adapter_name="a", inputs=rows(3), micro_batch_size=wrong)
        assert "micro_batch_size" in told


def test_metrics_begin_anew_once_they_are_told(native):
    set_up(native)
    native.verb("add_metric", adapter_name="a", metric_cls="CompletionRewardMetric", is_training=True)
    for reward in (1.0, 3.0):
        native.verb("forward_backward", adapter_name="a", inputs=rows(1), rewards={"right": [reward]})
        assert native.verb("calculate_metric", adapter_name="a")["train/right_reward"] == reward


def test_numbers_that_are_not_finite_never_leave(native):
    native.add_adapter("a", seed=1)
    native.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05)
    native.verb("set_loss", adapter_name="a", loss_cls="GRPOLoss")
    body = json.dumps({"adapter_name": "a", "inputs": rows(1), "advantages": [float("nan"), 1.0]})
    answer = native.http.post(f"/api/v1/model/{MODEL}/twinkle/forward_backward", content=body)
    assert answer.status_code == 400, answer.text
    native.verb("forward_backward", adapter_name="a", inputs=rows(1), advantages=[1.0, -1.0])
    native.verb("clip_grad_and_step", adapter_name="a")
    metrics = native.http.post(f"/api/v1/model/{MODEL}/twinkle/calculate_metric", json={"adapter_name": "a"})
    assert "NaN" not in metrics.text


# --- files ------------------------------------------------------------------------------------------------------------


def test_published_versions_take_the_place_of_older_ones(native):
    run = set_up(native)
    paths = []
    for seed in range(4):
        step(native, seed)
        paths.append(native.verb("save", adapter_name="a", name="policy", is_sampler=True)["twinkle_path"])
    assert len(set(paths)) == 4
    listed = native.http.get(f"/api/v1/twinkle/training_runs/{run}/checkpoints").json()["checkpoints"]
    assert [each["twinkle_path"] for each in listed] == paths[-2:]
    every_other = [native.verb("save", adapter_name="a", interval=2)["twinkle_path"] for _ in range(1)]
    assert every_other == [f"twinkle://{run}/weights/checkpoint-step-4"]
    step(native, 9)
    assert native.verb("save", adapter_name="a", interval=2)["twinkle_path"] == ""


def test_directories_that_the_owner_allows(own_server, tmp_path):
    shared = tmp_path / "shared"
    (shared / "out").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (shared / "link").symlink_to(tmp_path / "outside")
    (shared / "circle").symlink_to(shared / "circle")
    server = own_server(mock_config(allowed_dirs=[str(shared)]))
    native = NativeTenant(server.url, "tml-dirs", MODEL)
    run = set_up(native, save_dir=str(shared / "out"))
    step(native, 1)
    native.verb("save", adapter_name="a", name="x", save_optimizer=True)
    copied = shared / "out" / run / "weights" / "x"
    listed = native.http.get(f"/api/v1/twinkle/training_runs/{run}").json()
    assert listed["save_dir"] == str(shared / "out")
    assert (copied / "trainer_state.json").exists()
    set_up(native, "b")
    native.verb("resume_from_checkpoint", adapter_name="b", name=str(copied))
    weights = [native.verb("get_state_dict", adapter_name=name) for name in ("a", "b")]
    assert weights[0] == weights[1]
    folder = shared / "out" / run / "weights"
    for wrong, said in [
        (shared / "link", "allowed_dirs"),
        (shared / ".." / "outside", "allowed_dirs"),
        (Path("relative"), "allowed_dirs"),
        (tmp_path / "outside", "allowed_dirs"),
        (shared / "nothing", "a directory that exists on the server"),
        (shared / ("x" * 10_000), "a directory that exists on the server"),
        (shared / "circle", "allowed_dirs"),
        (copied / "trainer_state.json", "run's own folder"),
        (folder, "run's own folder"),
    ]:
        config = '{"r": 4, "target_modules": "all-linear"}'
        other = NativeTenant(server.url, "tml-other-tenant", MODEL)
        refusal = other.refusal("add_adapter_to_model", adapter_name="c", config=config, save_dir=str(wrong))
        assert said in refusal
        assert "save_dir" in refusal
    for wrong in (shared / "link", shared / ".." / "outside", Path("relative"), shared / "circle"):
        assert "allowed_dirs" in native.refusal("load", adapter_name="a", name=str(wrong))
    missing = native.refusal("load", adapter_name="a", name=str(shared / "nothing"))
    assert "nothing" in missing
    (shared / "out" / run).rename(shared / "moved-run")
    (shared / "out" / run).write_text("a file where the run's folder was")
    refusal = native.refusal("save", adapter_name="a", name="y")
    assert f"save_dir: twinkle://{run}/weights/y is saved, but could not be copied" in refusal
    (shared / "out" / run).unlink()
    (shared / "out" / run).symlink_to(tmp_path / "outside")
    assert "symbolic link" in native.refusal("save", adapter_name="a", name="y")
    (shared / "out").rename(shared / "moved")
    (shared / "out").symlink_to(tmp_path / "outside")  # a link that appears later leads nowhere else either
    assert "save_dir" in native.refusal("save", adapter_name="a", name="y")
    assert list((tmp_path / "outside").iterdir()) == []


def test_the_adapter_of_a_session_that_ended_is_resumed_in_another(native, server):
    set_up(native)
    losses = [step(native, seed) for seed in range(3)]
    expected = native.verb("forward_only", adapter_name="a", inputs=rows(7))["logps"]
    token = native.http.headers["Authorization"].removeprefix("Bearer ")
    ended = native.http.post("/api/v1/twinkle/finish_session", json={"session_id": native.session_id})
    assert ended.status_code == 200, ended.text
    later = NativeTenant(server.url, token, MODEL)
    listed = later.http.get(f"/api/v1/twinkle/training_runs/{native.session_id}-a/checkpoints").json()["checkpoints"]
    set_up(later)
    progress = later.verb("resume_from_checkpoint", adapter_name="a", name=listed[-1]["twinkle_path"])
    assert progress["cur_step"] == len(losses)
    assert later.verb("forward_only", adapter_name="a", inputs=rows(7))["logps"] == expected


# --- restarts ---------------------------------------------------------------------------------------------------------


def run_script(tenant: NativeTenant, interrupt: dict[int, object]) -> list[object]:
    """Run twelve steps of all kinds; ``interrupt`` has actions to run before some of them."""
    results: list[object] = []
    tenant.verb("add_metric", adapter_name="a", metric_cls="Accuracy", is_training=True)
    for number in range(12):
        if number in interrupt:
            interrupt[number]()
        if number % 4 == 3:
            tenant.verb("forward", adapter_name="a", inputs=rows(number))
            if number == 7 and 7.5 in interrupt:
                interrupt[7.5]()
            results.append(tenant.verb("calculate_loss", adapter_name="a"))
            tenant.verb("backward", adapter_name="a")
        else:
            results.append(tenant.verb("forward_backward", adapter_name="a", inputs=rows(number))["loss"])
        tenant.verb("clip_grad_and_step", adapter_name="a")
        if number % 3 == 2:
            metrics = tenant.verb("calculate_metric", adapter_name="a")
            results.append([metrics[name] for name in ("loss", "learning rate", "iters", "grad_norm")])
    results.append(tenant.verb("get_state_dict", adapter_name="a"))
    return results


@pytest.mark.parametrize(
    ("snapshot", "moments"),
    [(0.05, (2, 7.5, 10)), (3600.0, (5, 7.5))],
    ids=["from snapshots", "from the journal"],
)
def test_a_killed_server_goes_on_as_if_nothing_had_been(own_server, server, snapshot, moments):
    quiet = NativeTenant(server.url, f"tml-quiet-{snapshot}", MODEL)
    set_up(quiet, gradient_accumulation_steps=2)
    expected = run_script(quiet, {})

    fragile = own_server(snapshot=snapshot)
    tenant = NativeTenant(fragile.url, "tml-crash", MODEL)
    set_up(tenant, gradient_accumulation_steps=2)

    def crash() -> None:
        if snapshot < 1:
            time.sleep(0.3)
        fragile.kill()
        fragile.start()

    assert run_script(tenant, dict.fromkeys(moments, crash)) == expected


def test_a_request_that_was_running_when_the_server_died_is_asked_again(own_server):
    fragile = own_server(**{"pass": 1.0})
    tenant = NativeTenant(fragile.url, "tml-again", MODEL)
    tenant.add_adapter("a", seed=1)
    tenant.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05, seq_id=1)
    body = {"adapter_name": "a", "inputs": rows(3), "seq_id": 2}
    answers: list[object] = []

    def ask() -> None:
        while not answers:
            try:
                answer = tenant.post("forward_backward", **body)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                answers.append(answer.json())

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.4)
    fragile.kill()
    fragile.start()
    thread.join()
    tenant.verb("clip_grad_and_step", adapter_name="a", seq_id=3)
    metrics = tenant.verb("calculate_metric", adapter_name="a", seq_id=4)
    assert metrics["iters"] == 0
    assert float(metrics["loss"]) == pytest.approx(answers[0]["result"]["loss"] / 6, abs=1e-4)


def test_a_server_that_stops_asks_to_be_asked_again(own_server):
    slow = own_server(**{"pass": 2.0})
    tenant = NativeTenant(slow.url, "tml-stop", MODEL)
    tenant.add_adapter("a", seed=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tenant.post, "forward_backward", adapter_name="a", inputs=rows(1), seq_id=1)
        time.sleep(0.5)
        assert slow.stop() == 0
        answer = running.result()
    assert answer.status_code == 503
    assert "Retry-After" in answer.headers
    slow.start()
    assert tenant.verb("forward_backward", adapter_name="a", inputs=rows(1), seq_id=1)["loss"] > 0
