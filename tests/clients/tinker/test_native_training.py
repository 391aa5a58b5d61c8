"""The native protocol trains as the library does: each verb runs in this process and on a server."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tinker import types

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.serving import MODEL, SdkServer, key_of, sequences, tinker_data
from twinkle.model import MultiLoraTransformersModel, Trainer

SEED = 7
NAME = MODEL.removeprefix("random://")  # by which a server serves it


@pytest.fixture
def tenant(server: SdkServer, request: pytest.FixtureRequest) -> NativeTenant:
    return NativeTenant(server.url, f"native {request.node.name}", NAME)


@pytest.fixture
def local(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[MultiLoraTransformersModel]:
    """The library's model on the trainer that all tests share."""
    monkeypatch.setattr(Trainer, "from_pretrained", lambda *_args, **_options: trainer)
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="no", max_loras=8)
    yield model
    for name in list(model.optimizer_group):
        model.remove_adapter(name)


def features(seed: int, count: int = 3) -> list[dict[str, list[int]]]:
    rows = sequences(seed, count)
    return [
        {"input_ids": row[:-1].tolist(), "labels": [-100, *row[2:].tolist()], "messages": "not read"} for row in rows
    ]


class Both:
    """Calls each verb locally and on the server, with the same arguments."""

    def __init__(self, local: MultiLoraTransformersModel, tenant: NativeTenant, **options: Any) -> None:
        self.local, self.tenant = local, tenant
        tenant.add_adapter("a", seed=SEED, **options)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        local.add_adapter_to_model("a", config, seed=SEED, **options)

    def __call__(self, verb: str, **arguments: Any) -> tuple[Any, Any]:
        method: Callable[..., Any] = getattr(self.local, verb)
        return method(adapter_name="a", **arguments), self.tenant.verb(verb, adapter_name="a", **arguments)

    def passes(self, verb: str, **arguments: Any) -> tuple[Any, Any]:
        here, there = self(verb, **arguments)
        for row, padded in zip(there["logps"], here["logps"], strict=True):
            np.testing.assert_allclose(row, padded[: len(row)], atol=1e-5)
        if "loss" in here:
            np.testing.assert_allclose(there["loss"], here["loss"], rtol=1e-5)
            assert there["num_tokens"] == here["num_tokens"]
        return here, there


def close(here: dict[str, str], there: dict[str, str], *names: str) -> None:
    for name in names:
        assert float(here[name].rstrip("%")) == pytest.approx(float(there[name].rstrip("%")), abs=2e-4), name


def test_supervised_steps_are_those_of_the_library(local, tenant):
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=1e-2, weight_decay=0.0)
    both("set_lr_scheduler", scheduler_cls="LinearLR", start_factor=0.5, total_iters=4)
    for step in range(5):
        both.passes("forward_backward", inputs=features(step))
        both("clip_grad_and_step", max_grad_norm=1.0)
        here, there = both("calculate_metric", is_training=True)
        close(here, there, "loss", "grad_norm", "learning rate")
    both.passes("forward_only", inputs=features(9))
    here, there = both("calculate_loss")
    assert here == pytest.approx(there, rel=1e-5)
    here, there = both("get_state_dict")
    for name, tensor in here.items():
        difference = torch.linalg.norm(tensor - torch.tensor(there[name])) / torch.linalg.norm(tensor)
        assert difference < 1e-5, name


def test_gradients_accumulate_over_a_window(local, tenant):
    both = Both(local, tenant, gradient_accumulation_steps=2)
    both("set_optimizer", optimizer_cls="Adam", lr=1e-2)
    norms = []
    for step in range(4):
        both.passes("forward_backward", inputs=features(step, count=step + 1))
        here, there = both("clip_grad_norm", max_grad_norm=0.5, norm_type=2)
        norms.append((here, there))
        for verb in ("step", "zero_grad", "lr_step"):
            both(verb)
    assert [here is None for here, _ in norms] == [True, False, True, False]
    assert [there == "" for _, there in norms] == [True, False, True, False]
    assert float(norms[1][1]) == pytest.approx(norms[1][0], abs=1e-5)
    both.passes("forward_only", inputs=features(8))


def test_forward_loss_and_backward_one_by_one(local, tenant):
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    for step in range(2):
        both.passes("forward", inputs=features(step))
        here, there = both("calculate_loss")
        assert here == pytest.approx(there, rel=1e-5)
        both("backward")
        both("clip_grad_and_step")
    here, there = both("calculate_metric", is_training=True)
    close(here, there, "loss")


def test_preferences_with_the_base_model_as_reference(local, tenant):
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=5e-3)
    both("set_loss", loss_cls="DPOLoss", beta=0.1, sft_weight=0.5)
    both("add_metric", metric_cls="DPOMetric", beta=0.1)
    for step in range(3):
        pairs = features(step, count=4)
        here, there = both.passes("forward_only", inputs=pairs, disable_lora=True)
        local.forward_backward(inputs=pairs, ref_outputs=here, adapter_name="a")
        tenant.verb("forward_backward", inputs=pairs, ref_outputs=there, adapter_name="a")
        both("clip_grad_and_step")
        here, there = both("calculate_metric", is_training=True)
        close(here, there, "loss", "rewards/margins", "rewards/accuracies")


def test_policy_gradient(local, tenant):
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=5e-3)
    both("set_loss", loss_cls="GRPOLoss", epsilon=0.2, beta=0.0)
    rows = features(1)
    for _ in range(2):
        scores = [[-5.0] * sum(label != -100 for label in row["labels"]) for row in rows]
        both.passes("forward_backward", inputs=rows, old_logps=scores, advantages=[1.0, -0.5, 0.25], temperature=0.7)
        both("clip_grad_and_step")


def test_conversations_go_through_the_template(local, tenant):
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    tenant.verb("set_template", template_cls="Template", adapter_name="a", model_id=NAME, max_length=64)
    local.set_template("Template", adapter_name="a", max_length=64)
    chats = [{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}] * 2
    both.passes("forward_backward", inputs=chats)
    both.passes("forward_backward", inputs=chats[0])


def test_what_was_saved_is_resumed(local, tenant):
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    both("set_lr_scheduler", scheduler_cls="LinearLR", start_factor=0.1, total_iters=9)
    for step in range(2):
        both("forward_backward", inputs=features(step))
        both("clip_grad_and_step")
    saved = tenant.verb("save", name="my name", save_optimizer=True, consumed_train_samples=6, adapter_name="a")
    assert saved["twinkle_path"].endswith("/weights/my_name")
    assert saved["checkpoint_dir"] == saved["twinkle_path"]
    expected = [tenant.verb("forward_backward", inputs=features(5), adapter_name="a")["loss"]]
    tenant.verb("clip_grad_and_step", adapter_name="a")
    expected.append(tenant.verb("forward_backward", inputs=features(6), adapter_name="a")["loss"])

    tenant.add_adapter("b", seed=99)
    tenant.verb("set_optimizer", adapter_name="b", optimizer_cls="AdamW", lr=1e-2)
    tenant.verb("set_lr_scheduler", adapter_name="b", scheduler_cls="LinearLR", start_factor=0.1, total_iters=9)
    progress = tenant.verb("resume_from_checkpoint", name=saved["twinkle_path"], adapter_name="b")
    assert progress == {"cur_step": 2, "consumed_train_samples": 6, "gradient_accumulation_steps": 1}
    again = [tenant.verb("forward_backward", inputs=features(5), adapter_name="b")["loss"]]
    tenant.verb("clip_grad_and_step", adapter_name="b")
    again.append(tenant.verb("forward_backward", inputs=features(6), adapter_name="b")["loss"])
    np.testing.assert_allclose(again, expected, rtol=1e-5)


def test_native_and_tinker_clients_share_batches_and_do_not_notice(server, local, tenant, service):
    """Each client trains alone first; then both train at once for many steps, until a batch contained ops of both."""
    steps = 12
    met = threading.Event()
    plain = service.create_lora_training_client(MODEL, rank=4, seed=3, train_unembed=False)
    data = tinker_data(sequences(21))
    alone = [plain.forward(data, "cross_entropy").result().metrics["loss:sum"]]
    both = Both(local, tenant)
    both("set_optimizer", optimizer_cls="AdamW", lr=1e-3)

    def tinker_loop(losses: list[float]) -> None:
        client = server.service("native shares").create_lora_training_client(MODEL, rank=4, seed=3, train_unembed=False)
        for _ in range(steps):
            output = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.append(output.result().metrics["loss:sum"])
        while not met.is_set():
            for waiting in [client.forward(data, "cross_entropy") for _ in range(4)]:
                waiting.result()

    def mixed() -> bool:
        protocols = [{":train:" in op for op in batch} for batch in server.batches()[before:]]
        return {True, False} in protocols

    quiet: list[float] = []
    met.set()
    tinker_loop(quiet)
    assert quiet[0] == pytest.approx(alone[0], rel=1e-5)
    before = len(server.batches())
    crowded: list[float] = []
    met.clear()
    thread = threading.Thread(target=tinker_loop, args=(crowded,))
    thread.start()
    for step in range(steps):
        both.passes("forward_backward", inputs=features(step))
        both("clip_grad_and_step")
    deadline = time.monotonic() + 120
    while not mixed() and time.monotonic() < deadline:
        tenant.verb("forward_only", inputs=features(0), adapter_name="a")
    met.set()
    thread.join()
    np.testing.assert_allclose(crowded, quiet, rtol=1e-5)
    assert mixed()


def test_another_tenant_and_another_session_find_nothing(server, tenant):
    run = tenant.add_adapter("a")
    assert run == f"{tenant.session_id}-a"
    stranger = NativeTenant(server.url, "native stranger", NAME)
    unknown = stranger.refusal("step", 404, adapter_name="a")
    assert "a" in unknown
    stranger.http.headers["X-Twinkle-Session-Id"] = tenant.session_id
    assert "session" in stranger.refusal("step", 404, adapter_name="a")
    again = NativeTenant(server.url, "native test_another_tenant_and_another_session_find_nothing", NAME)
    again.refusal("step", 404, adapter_name="a")


def test_runs_of_both_protocols_in_both_listings(server, tenant):
    run = tenant.add_adapter("a")
    tenant.verb("save", name="x", adapter_name="a")
    listed = tenant.http.get("/api/v1/twinkle/training_runs").json()["training_runs"]
    assert [each["training_run_id"] for each in listed] == [run]
    key = key_of("both listings")
    spoken = NativeTenant(server.url, key, NAME)
    native = spoken.add_adapter("a")
    plain = server.service("both listings").create_lora_training_client(MODEL, rank=4)
    rest = server.rest("both listings")
    ids = {each.training_run_id for each in rest.list_training_runs().result().training_runs}
    assert ids == {native, plain.get_info().model_id}
