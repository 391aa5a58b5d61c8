"""Losses, optimizers and outputs by name on a served model: results of the library's own model, also after SIGKILL."""

import json
from typing import Any

import peft
import pytest
import torch

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import Server, torch_config
from twinkle.model import MultiLoraTransformersModel

MODEL = "random://llama-tiny"
VOCABULARY = 512
ROWS = [
    {"input_ids": [5, 9, 21, 7, 33], "labels": [9, 21, 7, 33, -100]},
    {"input_ids": [11, 2, 40, 8, 19, 77, 4], "labels": [-100, 40, 8, 19, 77, 4, -100]},
]
TEXTS = [{**row, "labels": [label]} for row, label in zip(ROWS, (1, 0), strict=True)]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SETTINGS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.01},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = torch_config(MODEL)
    config["limits"] = {**config.get("limits", {}), "max_logits_per_request": 12 * VOCABULARY}
    running = Server(tmp_path_factory.mktemp("real-model"), config).start()
    yield running
    running.close()


@pytest.fixture(scope="module")
def local() -> MultiLoraTransformersModel:
    torch.set_num_threads(1)
    return MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")


def both(server: Server, local: MultiLoraTransformersModel, name: str) -> NativeTenant:
    """Add the same adapter, with a few steps of training, to the server and to the library's model."""
    tenant = NativeTenant(server.url, f"tml-{name}", MODEL)
    config = json.dumps({**peft.LoraConfig(**LORA).to_dict(), "_TWINKLE_TYPE_": "LoraConfig"}, default=list)
    tenant.verb("add_adapter_to_model", adapter_name="a", config=config, seed=3)
    local.add_adapter_to_model(name, peft.LoraConfig(**LORA), seed=3)
    tenant.verb("set_optimizer", adapter_name="a", optimizer_cls="SGD", lr=5.0, weight_decay=0.0)
    local.set_optimizer("SGD", lr=5.0, weight_decay=0.0, adapter_name=name)
    for _ in range(2):
        tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)
        tenant.verb("step", adapter_name="a")
        local.forward_backward(inputs=ROWS, adapter_name=name)
        local.step(adapter_name=name)
    return tenant


def test_losses_on_logits_and_embeddings(server, local):
    tenant = both(server, local, "losses")
    teacher = torch.randn(2, 7, VOCABULARY, generator=torch.Generator().manual_seed(0))
    best = teacher.topk(3, dim=-1)
    rounded = teacher.round(decimals=3)
    lists = [row[: len(each["input_ids"])].tolist() for row, each in zip(rounded, ROWS, strict=True)]
    for loss, rows, arguments, task in [
        ("GKDLoss", ROWS, {"teacher_logits": lists}, {}),
        (
            "gkd",
            ROWS,
            {"teacher_topk_logprobs": best.values.tolist(), "teacher_topk_indices": best.indices.tolist()},
            {},
        ),
        ("InfonceLoss", TEXTS, {}, {"task": "embedding"}),
    ]:
        tenant.verb("set_loss", adapter_name="a", loss_cls=loss)
        local.set_loss(loss, adapter_name="losses")
        answer = tenant.verb("forward_backward", adapter_name="a", inputs=rows, **arguments, **task)
        expected = local.forward_backward(inputs=rows, adapter_name="losses", **arguments, **task)
        assert answer["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        tenant.verb("step", adapter_name="a")
        local.step(adapter_name="losses")
    state = tenant.verb("get_state_dict", adapter_name="a")
    for name, tensor in local.get_state_dict(adapter_name="losses").items():
        assert torch.allclose(torch.tensor(state[name]), tensor, atol=1e-5), name
    embeddings = tenant.verb("forward_only", adapter_name="a", inputs=TEXTS, task="embedding")["embeddings"]
    assert [len(each) for each in embeddings] == [64, 64]
    assert sum(number**2 for number in embeddings[0]) == pytest.approx(1, abs=1e-4)


def test_logits_come_back_up_to_the_limit(server, local):
    tenant = both(server, local, "logits")
    expected = local.forward_only(inputs=ROWS, adapter_name="logits", return_logits=True)["logits"]
    for body in ({"adapter_name": "a"}, {"adapter_name": ""}):
        answer = tenant.verb("forward_only", inputs=ROWS, return_logits=True, **body)
        assert [(len(rows), len(rows[0])) for rows in answer["logits"]] == [(5, VOCABULARY), (7, VOCABULARY)]
    answer = tenant.verb("forward_backward", adapter_name="a", inputs=ROWS, return_logits=True)
    assert torch.allclose(torch.tensor(answer["logits"][1]), expected[1], atol=1e-4)
    more = [*ROWS, ROWS[0]]
    said = tenant.refusal("forward_only", adapter_name="a", inputs=more, return_logits=True)
    assert "8704 numbers (17 tokens × 512" in said
    assert "at most 6144 (max_logits_per_request)" in said


def test_sampling_parameters_of_vllm(server):
    """Penalties change the samples of the native route and of OpenAI's; with ignore_eos no end token ends them."""
    tenant = NativeTenant(server.url, "tml-sampling", MODEL)
    prompt, penalties = ROWS[0]["input_ids"], {"presence_penalty": 2.0, "frequency_penalty": 2.0, "min_p": 0.01}
    greedy = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}

    def native(**more: Any) -> list[int]:
        body = {"inputs": [{"input_ids": prompt}], "sampling_params": {**greedy, **more}}
        answer = tenant.http.post(f"/api/v1/sampler/{MODEL}/twinkle/sample", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["samples"][0]["sequences"][0]["tokens"]

    plain, penalised = native(), native(**penalties, repetition_penalty=1.3)
    assert len(plain) == len(penalised) == 12
    assert plain != penalised
    body = {"model": MODEL, "prompt": prompt, "logprobs": 0, **greedy}
    texts = []
    for more in ({}, {**penalties, "repetition_penalty": 1.3}):
        answer = tenant.http.post("/v1/completions", json={**body, **more})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 12
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"inputs": ROWS, "teacher_logits": [[[1.0]]]},
            "teacher_logits: got 'shape (1, 1, 1)', allowed: (2, 7 or more",
        ),
        ({"inputs": ROWS, "teacher_logits": "many"}, "teacher_logits"),
        ({"inputs": ROWS, "teacher_topk_logprobs": [[[1.0]]]}, "teacher_topk_indices"),
        ({"inputs": TEXTS, "teacher_logits": [[[1.0]]]}, "inputs.labels: got 'one for each text'"),
        ({"inputs": [ROWS[0], TEXTS[1]], "teacher_logits": [[[1.0]]]}, "one kind in a request"),
        ({"inputs": TEXTS, "task": "embedding"}, "task: got 'embedding', allowed: 'causal_lm' with GKDLoss"),
        ({"inputs": TEXTS, "task": "classify"}, "task: got 'classify'"),
    ],
)
def test_malformed_requests_fail_alone(server, body, said):
    tenant = NativeTenant(server.url, "tml-malformed", MODEL)
    tenant.add_adapter("a", seed=1)
    tenant.verb("set_loss", adapter_name="a", loss_cls="GKDLoss")
    assert said in tenant.refusal("forward_backward", adapter_name="a", **body)
    tenant.verb("set_loss", adapter_name="a", loss_cls="cross_entropy")
    assert tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)["loss"] > 0


def test_optimizers_go_on_after_sigkill(server, tmp_path):
    """Each adapter takes four steps; the second server is killed after two. The weights are equal up to rounding.

    A server that replays computes several adapters in one batch, which changes the last bits of a gradient. A step
    that was lost or taken twice would change a tensor of B by a tenth of its norm or more.
    """
    fragile = Server(tmp_path, torch_config(MODEL)).start()
    try:
        states = []
        for running in (server, fragile):
            tenant = NativeTenant(running.url, "tml-optimizers", MODEL)
            for name, settings in SETTINGS.items():
                tenant.add_adapter(name, seed=2)
                tenant.verb("set_optimizer", adapter_name=name, optimizer_cls=name, **settings)
            for number in range(4):
                if running is fragile and number == 2:
                    running.kill()
                    running.start()
                for name in SETTINGS:
                    tenant.verb("forward_backward", adapter_name=name, inputs=[ROWS[number % 2]])
                    tenant.verb("clip_grad_and_step", adapter_name=name)
            states.append({name: tenant.verb("get_state_dict", adapter_name=name) for name in SETTINGS})
        left, right = states
        for name, tensors in left.items():
            bound = 2e-2 if name == "Muon" else 1e-5  # Muon rounds to bfloat16
            for key, values in tensors.items():
                expected = torch.tensor(values)
                assert (torch.tensor(right[name][key]) - expected).norm() <= bound * expected.norm(), (name, key)
    finally:
        fragile.close()


def test_the_state_of_an_optimizer_is_saved_and_resumed(server):
    """A run goes on from a checkpoint with its momentum; an unknown optimizer is refused with the known ones."""
    tenant = NativeTenant(server.url, "tml-saved", MODEL)
    for name in ("a", "b"):
        tenant.add_adapter(name, seed=2)
        tenant.verb("set_optimizer", adapter_name=name, optimizer_cls="SGD", lr=0.1, momentum=0.9)
    tenant.verb("forward_backward", adapter_name="a", inputs=ROWS)
    tenant.verb("step", adapter_name="a")
    path = tenant.verb("save", adapter_name="a", name="x", save_optimizer=True)["twinkle_path"]
    tenant.verb("resume_from_checkpoint", adapter_name="b", name=path)
    for name in ("a", "b"):
        tenant.verb("forward_backward", adapter_name=name, inputs=ROWS)
        tenant.verb("step", adapter_name=name)
    weights = [tenant.verb("get_state_dict", adapter_name=name) for name in ("a", "b")]
    assert weights[0] == weights[1]
    said = tenant.refusal("set_optimizer", adapter_name="a", optimizer_cls="LBFGS")
    assert "known: ASGD, Adadelta" in said
    assert "Muon" in said
    tenant.verb("set_lr_scheduler", adapter_name="b", scheduler_cls="LinearLR")
    resumed = tenant.post("resume_from_checkpoint", adapter_name="b", name=path).json()
    assert resumed["missing"] == ["scheduler.pt"]
    assert resumed["result"]["cur_step"] == 1
