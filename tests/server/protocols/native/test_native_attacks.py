"""A malicious or unlucky tenant of the native protocol: no other tenant is affected, and nothing of theirs is lost."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant, key_for
from twinkle.server.backends.mock import MockTrainer
from twinkle.server.gateway import hub_uploads as uploads
from twinkle.server.http.routes import Call
from twinkle.server.protocols.native import model_routes
from twinkle.server.protocols.tinker import training
from twinkle.server.tenancy.work_pools import WorkPools
from twinkle.server.types import NativeVerb
from twinkle.server.verbs.adapters import NativeAdapters
from twinkle.server.wire.requests import GetInfoRequest

ROWS = [
    {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, 3, 4, 5, 6, 7]},
    {"input_ids": [9, 8, 7], "labels": [8, 7, 6]},
]
OLD = {"old_logps": [[-1.0] * 6, [-1.0] * 3], "advantages": [1.0, -1.0]}


@pytest.fixture
def native(server: Server, request: pytest.FixtureRequest) -> NativeTenant:
    return NativeTenant(server.url, key_for(request.node.nodeid), MODEL)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes snapshots at once; tests kill and restart it."""
    server = Server(tmp_path_factory.mktemp("fragile"), snapshot=0.05).start()
    yield server
    server.close()


def set_up(tenant: NativeTenant, name: str = "a") -> None:
    tenant.add_adapter(name, seed=1)
    tenant.verb("set_optimizer", adapter_name=name, optimizer_cls="AdamW", lr=0.05)


def restart(server: Server, *, after: float = 0.0) -> None:
    time.sleep(after)  # time for a snapshot
    server.kill()
    server.start()


def learning_rate(tenant: NativeTenant) -> str:
    lines = tenant.verb("get_train_configs", adapter_name="a").splitlines()
    return next(line for line in lines if "learning rate" in line)


# --- what comes back after a restart ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "metric"), [("GRPOLoss", "GRPOMetric"), ("GSPOLoss", "GSPOMetric")])
def test_metrics_of_policies_are_in_snapshots(fragile, loss, metric):
    tenant = NativeTenant(fragile.url, f"tml-{metric}", MODEL)
    set_up(tenant)
    tenant.verb("set_loss", adapter_name="a", loss_cls=loss)
    tenant.verb("add_metric", adapter_name="a", metric_cls=metric, is_training=True, top_k_kl=2)
    tenant.verb("forward_backward", adapter_name="a", inputs=ROWS, **OLD)
    tenant.verb("step", adapter_name="a")
    before = tenant.verb("get_state_dict", adapter_name="a")
    restart(fragile, after=0.5)
    assert tenant.verb("get_state_dict", adapter_name="a") == before
    assert "train/approx_kl" in tenant.verb("calculate_metric", adapter_name="a")


def test_an_adapter_whose_snapshot_cannot_be_read_comes_back_from_its_journal(fragile):
    good, bad = (NativeTenant(fragile.url, f"tml-{name}", MODEL) for name in ("good", "bad"))
    for tenant in (good, bad):
        set_up(tenant)
    deadline = time.monotonic() + 60
    snapshots = f"snapshots/{bad.session_id}-a/*/native.pt"
    while not list(fragile.data_dir.glob(snapshots)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # its record is written after its files
    fragile.kill()
    for file in fragile.data_dir.glob(snapshots):
        file.write_bytes(b"no snapshot")
    fragile.start()
    assert f"damaged: run {bad.session_id}-a" in fragile.log()
    bad.verb("step", adapter_name="a")
    good.verb("step", adapter_name="a")


def test_a_pass_after_a_failed_one_is_not_lost(own_server):
    """A metric that refuses a pass fails the next one, once. A replay must give the same result."""
    server = own_server(snapshot=3600.0)
    tenant = NativeTenant(server.url, "tml-replay", MODEL)
    set_up(tenant)
    tenant.verb("add_metric", adapter_name="a", metric_cls="GRPOMetric", is_training=True, ignore_index="x")
    tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)
    tenant.refusal("forward_backward", adapter_name="a", inputs=ROWS)
    tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)
    tenant.verb("step", adapter_name="a")
    before = tenant.verb("get_state_dict", adapter_name="a")
    restart(server)
    assert tenant.verb("get_state_dict", adapter_name="a") == before
    assert "though it had succeeded" not in server.log()


def test_a_step_whose_schedule_had_ended_is_not_lost(own_server):
    server = own_server(snapshot=3600.0)
    tenant = NativeTenant(server.url, "tml-cycle", MODEL)
    set_up(tenant)
    tenant.verb("set_lr_scheduler", adapter_name="a", scheduler_cls="OneCycleLR", max_lr=0.1, total_steps=2)
    for number in range(4):
        tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)
        tenant.post("clip_grad_and_step", adapter_name="a")
        assert number < 2 or "total steps is 2" in tenant.refusal("lr_step", adapter_name="a")
    before = tenant.verb("get_state_dict", adapter_name="a")
    restart(server)
    assert tenant.verb("get_state_dict", adapter_name="a") == before


def test_an_evaluation_that_waits_for_its_loss_survives(fragile):
    tenant = NativeTenant(fragile.url, "tml-evaluation", MODEL)
    set_up(tenant)
    tenant.verb("forward_only", adapter_name="a", inputs=ROWS)
    restart(fragile, after=0.5)
    assert tenant.verb("calculate_loss", adapter_name="a") > 0


# --- requests that fail change nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"mode": "bogus"}, {"scale_fn": "x"}])
def test_a_scheduler_that_is_refused_leaves_the_learning_rate(native, options):
    set_up(native)
    before = learning_rate(native)
    native.refusal("set_lr_scheduler", adapter_name="a", scheduler_cls="CyclicLR", base_lr=5.0, max_lr=6.0, **options)
    assert learning_rate(native) == before


def test_a_scheduler_that_could_never_step_is_refused(native):
    set_up(native)
    assert "lr_step" in native.refusal("set_lr_scheduler", adapter_name="a", scheduler_cls="ReduceLROnPlateau")


def test_a_pass_that_fails_leaves_the_window(native):
    set_up(native)
    native.refusal("forward_backward", adapter_name="a", inputs=[{"input_ids": [1], "labels": [10**9]}])
    bad = [{"input_ids": [1, 2], "labels": [2, 3], "position_ids": [5, 9]}]
    native.refusal("forward_backward", adapter_name="a", inputs=bad, gradient_accumulation_steps=7)
    assert "accumulation steps: 1" in native.verb("get_train_configs", adapter_name="a")


@pytest.mark.parametrize("options", [{"fused": True, "foreach": True}, {"lr": 10**400}, {"eps": 10**400}])
def test_optimizers_that_cannot_be(native, options):
    native.add_adapter("a")
    native.refusal("set_optimizer", adapter_name="a", optimizer_cls="AdamW", **options)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("SGD", {"momentum": 0.9, "dampening": "x"}, "dampening: got 'x', allowed: a number"),
        ("SGD", {"momentum": 0.9, "nesterov": "no"}, "nesterov: got 'no', allowed: True or False"),
        ("SGD", {"momentum": 0.9, "dampening": -1e308}, "settings of SGD: got {"),  # fails in the second step only
        ("AdamW", {"betas": ["a", "b"]}, "betas: got ['a', 'b'], allowed: two numbers"),
        ("AdamW", {"eps": 0}, "eps: got 0, allowed: a number > 0"),
        ("Muon", {"ns_coefficients": [1, 2]}, "ns_coefficients: got [1, 2], allowed: 3 numbers"),
    ],
)
def test_settings_of_optimizers_are_refused_by_name(native, name, options, said):
    native.add_adapter("a")
    assert said in native.refusal("set_optimizer", adapter_name="a", optimizer_cls=name, **options)


# --- limits of one tenant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["(.*)*" * 12 + "x", "(a+)+$", "(a|a)" * 12, "(?:x*)*y", "a{1,9}", "x" * 300])
def test_patterns_that_might_never_end(native, pattern):
    config = {"r": 4, "lora_alpha": 8, "target_modules": pattern}
    said = native.refusal("add_adapter_to_model", adapter_name="a", config=config)
    assert "target_modules" in said


def test_patterns_of_names(native):
    config = {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(q_proj|v_proj)|.*layer.+"}
    answer = native.post("add_adapter_to_model", adapter_name="a", config=config)
    assert "pattern of names" not in answer.text


@pytest.mark.parametrize(
    ("mesh", "said"),
    [(10**700, "64-bit"), (json.loads("[" * 100 + "]" * 100), "levels"), ("x" * 100_000, "65536")],
    ids=["long", "deep", "large"],
)
def test_settings_are_small(native, mesh, said):
    native.add_adapter("a")
    assert said in native.refusal("add_metric", adapter_name="a", metric_cls="Accuracy", device_mesh=mesh)


def test_configurations_are_no_deeper_than_they_need_be(native):
    assert "config" in native.refusal("add_adapter_to_model", adapter_name="a", config="[" * 50_000)


def test_metrics_have_an_end(native):
    native.add_adapter("a")
    answers = [native.post("add_metric", adapter_name="a", metric_cls="LossMetric") for _ in range(40)]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 400
    assert "at most" in answers[-1].text


@pytest.mark.parametrize(("verb", "size"), [("step", 2**21), ("forward_only", 2**25)])
def test_bodies_that_would_keep_everybody_waiting(native, verb, size):
    native.add_adapter("a")
    body = b'{"adapter_name":"a","x":[' + b"[]," * (size // 3) + b"[]]}"
    answer = native.http.post(f"/api/v1/model/{MODEL}/twinkle/{verb}", content=body)
    assert answer.status_code == 413


def test_a_hub_that_does_not_answer_keeps_no_thread_of_others(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(uploads, "_push", lambda *_arguments: str(released.wait(60)))

    async def scenario() -> str:
        hub = uploads.HubUploads(WorkPools().hub)
        for number in range(40):
            hub.start(f"tenant {number // 4}", None, Path(), "twinkle://r/weights/c", "org/name", "token")
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 10)
        finally:
            released.set()

    assert asyncio.run(scenario()) == "done"


def test_one_tenant_does_not_hold_all_threads_for_hubs(monkeypatch):
    released, begun = threading.Event(), threading.Semaphore(0)

    def push(repo_id: str, *_arguments: object) -> str:
        begun.release()
        if repo_id == "greedy/name":
            released.wait(60)
        return repo_id

    monkeypatch.setattr(uploads, "_push", push)

    async def scenario() -> None:
        hub = uploads.HubUploads(WorkPools().hub)
        try:
            for _ in range(4):
                hub.start("greedy", None, Path(), "twinkle://r/weights/c", "greedy/name", "token")
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=30)
            honest = hub.start("honest", None, Path(), "twinkle://r/weights/c", "honest/name", "token")
            async with asyncio.timeout(30):
                while hub.status("honest", honest).status != "completed":
                    await asyncio.sleep(0.01)
        finally:
            released.set()

    asyncio.run(scenario())


def test_templates_are_not_built_in_the_compute_thread():
    """This test has no templates to build one with, so building one would fail."""
    model = SimpleNamespace(trainer=MockTrainer(), name="m", tokenizer_dir=None, max_context_length=8)
    adapters = NativeAdapters(model, templates=None)
    adapters.add("a", {})
    adapters.run("a", NativeVerb("set_template", {"template_cls": "Template"}))


# --- both protocols on one server -------------------------------------------------------------------------------------


def test_sessions_of_the_other_protocol_have_no_native_adapters(server: Server, tenant: Tenant):
    native = NativeTenant(server.url, tenant.key, MODEL)
    native.http.headers["X-Twinkle-Session-Id"] = tenant.session()
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    said = native.refusal("add_adapter_to_model", adapter_name="a", config=config)
    assert "X-Twinkle-Session-Id" in said


# --- what a client elsewhere must not learn ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "header", "public_url", "told"),
    [
        ("127.0.0.1:8000", "accept", None, True),
        ("localhost", "accept", None, True),
        ("twinkle.example.com", "accept", None, False),  # a proxy that only passes the Host header on
        ("localhost", "x-forwarded-for", None, False),
        ("localhost", "accept", "https://twinkle.example.com", False),
    ],
)
def test_only_clients_on_this_machine_learn_folders(host: str, header: str, public_url: str | None, told: bool) -> None:
    """Behind a proxy on this machine, every client has a loopback address."""
    model = SimpleNamespace(
        name="m", architecture="llama", max_context_length=8, tokenizer_dir="/srv/m", tokenizer_id="org/m"
    )
    entry, run = SimpleNamespace(model=model), SimpleNamespace(run_id="r", model_name="m", base_model="m")
    run.spec = run.lora = SimpleNamespace(rank=8)

    async def run_record(_model_id: str, _tenant_id: str) -> SimpleNamespace:
        return run

    gateway: Any = SimpleNamespace(
        config=SimpleNamespace(public_url=public_url),
        model=lambda _name: entry,
        serving=lambda _name: entry,
        run_record=run_record,
    )
    request = Request(
        {
            "type": "http",
            "scheme": "http",
            "path": "/",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 40000),
            "headers": [(b"host", host.encode()), (header.encode(), b"10.0.0.1")],
            "app": SimpleNamespace(state=SimpleNamespace(gateway=gateway)),
        }
    )
    call = Call(request, gateway, "t", b"", b"")
    native = json.loads(bytes(asyncio.run(model_routes.get_info(call, "m")).body))
    assert native.get("model_folder") == ("/srv/m" if told else None)
    of_run: Any = Call(request, gateway, "t", b"", GetInfoRequest(model_id="r"))
    tinkers = json.loads(bytes(asyncio.run(training.get_info(of_run)).body))
    assert tinkers["model_data"]["tokenizer_id"] == ("/srv/m" if told else "org/m")
