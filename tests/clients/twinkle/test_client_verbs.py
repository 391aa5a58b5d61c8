"""The verbs of a model on a server: requests, results, and what happens if no result arrives."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.clients.twinkle.stub_server import SESSION, Drop, Status
from twinkle_client import (
    ConnectionLostError,
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
    ServerError,
    TwinkleClientError,
    types,
)
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.template import Template

M = "/model/Qwen/Qwen3.5-4B/twinkle"
VERBS = ("set_loss", "set_optimizer", "set_lr_scheduler", "set_template", "set_processor", "add_metric", "apply_patch")
VERBS += ("backward", "step", "zero_grad", "lr_step", "clip_grad_and_step", "load")


@pytest.fixture
def model(stub, client):
    stub.answer(f"{M}/create", {"status": "ok"})
    stub.answer(f"{M}/add_adapter_to_model", {"status": "ok", "adapter_name": f"{SESSION}-default"})
    for verb in VERBS:
        stub.answer(f"{M}/{verb}", None)
    model = MultiLoraTransformersModel("ms://Qwen/Qwen3.5-4B", client=client)
    model.add_adapter_to_model("default", LoraConfig(r=4), gradient_accumulation_steps=2)
    return model


def sent(stub, verb):
    """Return the bodies sent to a verb, without sequence numbers."""
    return [{key: value for key, value in body.items() if key != "seq_id"} for body in stub.bodies(f"{M}/{verb}")]


# --- what the client sends --------------------------------------------------------------------------------------------


def test_the_recorded_conversation(stub, model):
    """The client sends the bodies that were recorded from twinkle-kit's client."""
    stub.answer(f"{M}/forward_backward", {"result": {"loss": 1.0}})
    stub.answer(f"{M}/calculate_metric", {"result": {"loss": "1.0"}})
    stub.answer(f"{M}/save", {"twinkle_path": "twinkle://r/weights/n", "checkpoint_dir": "twinkle://r/weights/n"})
    assert stub.bodies(f"{M}/create") == [{}]
    model.set_template("Qwen3_5Template")
    model.set_processor("InputProcessor", padding_side="right")
    model.add_metric("EmbeddingMetric", is_training=True)
    rows = [{"input_ids": [1, 2], "labels": [2, -100]}]
    model.forward_backward(inputs=rows, advantages=[0.5], old_logps=[[-0.1]])
    model.step()
    model.clip_grad_and_step()
    model.calculate_metric(is_training=True)
    model.save("n", save_optimizer=True, consumed_train_samples=4)

    template = {"template_cls": "Qwen3_5Template", "adapter_name": "default", "model_id": "Qwen/Qwen3.5-4B"}
    assert sent(stub, "set_template") == [template]
    processor = {"processor_cls": "InputProcessor", "adapter_name": "default", "padding_side": "right"}
    assert sent(stub, "set_processor") == [processor]
    assert sent(stub, "add_metric") == [
        {"metric_cls": "EmbeddingMetric", "is_training": True, "adapter_name": "default"}
    ]
    assert sent(stub, "forward_backward") == [
        {"inputs": rows, "adapter_name": "default", "advantages": [0.5], "old_logps": [[-0.1]]}
    ]
    assert sent(stub, "step") == [{"adapter_name": "default"}]
    assert sent(stub, "clip_grad_and_step") == [{"max_grad_norm": 1.0, "norm_type": 2, "adapter_name": "default"}]
    assert sent(stub, "calculate_metric") == [{"is_training": True, "adapter_name": "default"}]
    assert sent(stub, "save") == [
        {"name": "n", "adapter_name": "default", "save_optimizer": True, "consumed_train_samples": 4}
    ]
    assert stub.requests[-1].headers["x-twinkle-session-id"] == SESSION


def test_further_verbs(stub, model):
    model.set_loss("DPOLoss", beta=0.1, loss_type="sigmoid")
    model.set_optimizer("Adam", lr=1e-4)
    model.set_lr_scheduler("LinearLR", start_factor=0.5)
    model.step(optim_params={"lr": 0.1}, gradient_accumulation_steps=3)
    model.load("twinkle://r/weights/n", load_optimizer=True)
    assert sent(stub, "set_loss") == [
        {"loss_cls": "DPOLoss", "beta": 0.1, "loss_type": "sigmoid", "adapter_name": "default"}
    ]
    assert sent(stub, "set_optimizer") == [{"optimizer_cls": "Adam", "lr": 1e-4, "adapter_name": "default"}]
    assert sent(stub, "set_lr_scheduler") == [
        {"scheduler_cls": "LinearLR", "start_factor": 0.5, "adapter_name": "default"}
    ]
    assert sent(stub, "step") == [
        {"optim_params": {"lr": 0.1}, "gradient_accumulation_steps": 3, "adapter_name": "default"}
    ]
    assert sent(stub, "load") == [{"name": "twinkle://r/weights/n", "load_optimizer": True, "adapter_name": "default"}]


def test_rows_may_hold_arrays_and_pictures(stub, model):
    stub.answer(f"{M}/forward_only", {"result": {"logps": [[-0.5]]}})
    row = {"input_ids": np.array([1, 2]), "labels": np.array([2, -100]), "image": object()}
    model.forward_only(inputs=[row], disable_lora=True)
    assert sent(stub, "forward_only") == [
        {"inputs": [{"input_ids": [1, 2], "labels": [2, -100]}], "disable_lora": True, "adapter_name": "default"}
    ]


def test_outputs_go_back_as_a_reference(stub, model):
    stub.answer(f"{M}/forward_only", {"result": {"logps": [[-0.5]], "loss": None}})
    stub.answer(f"{M}/forward_backward", {"result": {"loss": 1.0}})
    reference = model.forward_only(inputs=[{"input_ids": [1]}], disable_lora=True)
    for outputs in (reference, reference.result):
        model.forward_backward(inputs=[{"input_ids": [1]}], ref_outputs=outputs)
        assert sent(stub, "forward_backward")[-1]["ref_outputs"] == {"logps": [[-0.5]], "loss": None}


def test_classes_travel_by_name_and_code_does_not(stub, model):
    torch = pytest.importorskip("torch")
    from twinkle.loss import CrossEntropyLoss

    model.set_optimizer(torch.optim.AdamW, lr=1e-3)
    model.set_loss(CrossEntropyLoss)
    model.set_template(Template("m", max_length=64))
    assert sent(stub, "set_optimizer")[0]["optimizer_cls"] == "AdamW"
    assert sent(stub, "set_loss")[0]["loss_cls"] == "CrossEntropyLoss"
    template = {"template_cls": "Template", "model_id": "m", "max_length": 64, "adapter_name": "default"}
    assert sent(stub, "set_template") == [template]

    class MyLoss:
        pass

    for mine in (MyLoss, lambda inputs, outputs: 0.0):
        with pytest.raises(InvalidRequestError, match=r"loss_cls: .* never shipped"):
            model.set_loss(mine)
    with pytest.raises(InvalidRequestError, match="loss_cls: got 3"):
        model.set_loss(3)


# --- adapters ---------------------------------------------------------------------------------------------------------


def config_of(stub):
    return json.loads(stub.bodies(f"{M}/add_adapter_to_model")[-1]["config"])


def test_configs_in_all_forms(stub, model):
    config = config_of(stub)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, "all-linear")
    assert (config["lora_dropout"], config["_TWINKLE_TYPE_"]) == (0.0, "LoraConfig")
    assert stub.bodies(f"{M}/add_adapter_to_model")[-1]["gradient_accumulation_steps"] == 2
    model.add_adapter_to_model("b", {"r": 2}, save_dir="/srv/x", seed=5)
    assert config_of(stub) == {"r": 2, "target_modules": "all-linear", "_TWINKLE_TYPE_": "LoraConfig"}
    body = stub.bodies(f"{M}/add_adapter_to_model")[-1]
    assert (body["save_dir"], body["seed"]) == ("/srv/x", 5)
    with pytest.raises(InvalidRequestError, match="config: got 3"):
        model.add_adapter_to_model("c", 3)


def test_the_options_of_configs_are_sent_and_have_pefts_defaults(stub, model):
    peft = pytest.importorskip("peft")
    options = {
        "lora_dropout": 0.05,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 4, "q_proj": 2},
        "alpha_pattern": {"q_proj": 3},
        "exclude_modules": ["o_proj"],
        "layers_to_transform": [0],
        "init_lora_weights": "gaussian",
    }
    for name, kind in (("own", LoraConfig), ("peft", peft.LoraConfig)):
        model.add_adapter_to_model(name, kind(target_modules=["q_proj", "v_proj"], **options))
        config = config_of(stub)
        assert {field: config[field] for field in options} == options
        assert list(config["rank_pattern"]) == ["v_proj", "q_proj"], "the first pattern that matches counts"
    assert all(getattr(peft.LoraConfig(), field) == getattr(LoraConfig(), field) for field in options)


def test_pefts_config(stub, model):
    peft = pytest.importorskip("peft")
    model.add_adapter_to_model("p", peft.LoraConfig(r=16, lora_alpha=32, target_modules=["v_proj", "q_proj"]))
    config = config_of(stub)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (16, 32, "LORA")
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["_TWINKLE_TYPE_"] == "LoraConfig"
    assert "runtime_config" not in config


def test_the_last_adapter_is_meant_unless_one_is_named(stub, model):
    with pytest.raises(InvalidRequestError, match="unknown adapter 'second', known: default"):
        model.step(adapter_name="second")
    model.add_adapter_to_model("second", LoraConfig())
    model.step()
    model.step(adapter_name="default")
    assert [body["adapter_name"] for body in stub.bodies(f"{M}/step")] == ["second", "default"]


def test_no_adapter_yet(stub, client, model):
    with pytest.raises(InvalidRequestError, match="call add_adapter_to_model first"):
        MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=client).step()


def test_seeds_come_from_the_clients(stub, connect, model):
    seeds = []
    for seed in (1, 1, 2):
        handle = MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=connect(seed=seed))
        for name in ("a", "b"):
            handle.add_adapter_to_model(name, LoraConfig())
            seeds.append(stub.bodies(f"{M}/add_adapter_to_model")[-1]["seed"])
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert "seed" not in stub.bodies(f"{M}/add_adapter_to_model")[0]


def test_options_of_the_local_class(stub, client, model):
    local = {"mixed_precision": "bf16", "max_loras": 2, "max_r": 16, "max_length": 256, "device": "cuda"}
    MultiLoraTransformersModel(model_id="Qwen/Qwen3.5-4B", client=client, **local)
    with pytest.raises(TypeError, match="fsdp_options"):
        MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=client, fsdp_options={})
    with pytest.raises(NotFoundError):
        MultiLoraTransformersModel("other", client=client)
    for nothing in ("", "ms://", None):
        with pytest.raises(InvalidRequestError, match="model_id"):
            MultiLoraTransformersModel(nothing, client=client)


# --- what the client returns ------------------------------------------------------------------------------------------


def test_results_are_what_a_local_model_returns_and_what_older_clients_return(stub, model):
    stub.answer(f"{M}/forward_backward", {"result": {"loss": 1.5, "logps": [[-0.5]]}})
    stub.answer(f"{M}/calculate_metric", {"result": {"loss": "1.5"}})
    stub.answer(f"{M}/get_train_configs", {"result": "LoRA"})
    stub.answer(f"{M}/calculate_loss", {"result": 0.25})
    stub.answer(f"{M}/get_state_dict", {"result": {"w": [1.0]}})
    outputs = model.forward_backward(inputs=[{"input_ids": [1]}])
    assert outputs["loss"] == outputs.result["loss"] == 1.5
    assert outputs.model_dump() == {"result": {"loss": 1.5, "logps": [[-0.5]]}}
    assert json.loads(outputs.model_dump_json(indent=2)) == outputs.model_dump()
    metric = model.calculate_metric(is_training=True)
    assert metric == metric.result == {"loss": "1.5"}
    configs = model.get_train_configs()
    assert configs == configs.result == "LoRA"
    loss = model.calculate_loss()
    assert loss == loss.result == 0.25
    assert model.get_state_dict() == {"w": [1.0]}


def test_saving(stub, model):
    address = "twinkle://r/weights/n"
    stub.answer(f"{M}/save", {"twinkle_path": address, "checkpoint_dir": address})
    saved = model.save("n")
    assert saved == saved.twinkle_path == saved.checkpoint_dir == address
    assert saved.model_dump() == json.loads(saved.model_dump_json())
    model.load(saved)
    assert sent(stub, "load")[-1]["name"] == address
    for nothing in (None, {"twinkle_path": "", "checkpoint_dir": None}):
        stub.answer(f"{M}/save", nothing)
        assert model.save("n", interval=10) is None
    assert sent(stub, "save")[-1]["interval"] == 10


def test_norms_and_progress(stub, model):
    for answer, norm in (({"result": "0.51"}, 0.51), ({"result": ""}, None), (None, None)):
        stub.answer(f"{M}/clip_grad_norm", answer)
        assert model.clip_grad_norm(0.5) == norm
    stub.answer(f"{M}/clip_grad_and_step", {"result": "2.0"})
    assert model.clip_grad_and_step() == 2.0
    stub.answer(f"{M}/clip_grad_and_step", {"result": None})
    assert model.clip_grad_and_step() is None
    progress = {"cur_step": 10, "consumed_train_samples": 40, "gradient_accumulation_steps": 2}
    stub.answer(f"{M}/resume_from_checkpoint", {"result": progress})
    assert model.resume_from_checkpoint("twinkle://r/weights/n", resume_only_model=True) == progress
    assert sent(stub, "resume_from_checkpoint") == [
        {"name": "twinkle://r/weights/n", "resume_only_model": True, "adapter_name": "default"}
    ]


@pytest.mark.parametrize("nothing", [None, {"result": None}], ids=["null", "result"])
def test_servers_have_two_ways_to_say_nothing(stub, model, nothing):
    for verb in VERBS:
        stub.answer(f"{M}/{verb}", nothing)
    said = [
        model.set_loss("CrossEntropyLoss"),
        model.set_optimizer("Adam", lr=1e-4),
        model.set_lr_scheduler("LinearLR"),
        model.set_template("Template"),
        model.set_processor("InputProcessor"),
        model.add_metric("LossMetric"),
        model.apply_patch("Patch"),
        model.backward(),
        model.step(),
        model.zero_grad(),
        model.lr_step(),
        model.clip_grad_and_step(),
        model.load("twinkle://r/weights/n"),
    ]
    *others, norm, loaded = said
    assert norm is None
    names = [type(each).__name__ for each in (*others, loaded)]
    assert names == [
        "SetLossResponse",
        "SetOptimizerResponse",
        "SetLrSchedulerResponse",
        "SetTemplateResponse",
        "SetProcessorResponse",
        "AddMetricResponse",
        "ApplyPatchResponse",
        "BackwardResponse",
        "StepResponse",
        "ZeroGradResponse",
        "LrStepResponse",
        "LoadResponse",
    ]
    for each in (*others, loaded):
        assert isinstance(each, types.OkResponse)
        assert each.status == "ok"
        assert each.model_dump() == {"status": "ok"}


def test_uploading(stub, model):
    stub.answer(f"{M}/upload_to_hub", {"request_id": "req_1"})
    states = iter(["running", "completed", "failed"])
    stub.answer(
        f"{M}/upload_status/req_1", lambda _: {"request_id": "req_1", "status": next(states), "error": "no room"}
    )
    model.upload_to_hub("twinkle://r/weights/n", "me/mine", "hub-token", poll_interval=0.01)
    assert len(stub.asked(f"{M}/upload_status/req_1")) == 2
    assert stub.asked(f"{M}/upload_to_hub")[0].headers["x-idempotency-key"]
    with pytest.raises(ServerError, match="no room"):
        model.upload_to_hub({"twinkle_path": "twinkle://r/weights/n"}, "me/mine", "hub-token", poll_interval=0.01)


# --- sequence numbers -------------------------------------------------------------------------------------------------


def numbers(stub, verb="step"):
    return [body["seq_id"] for body in stub.bodies(f"{M}/{verb}")]


def test_verbs_are_numbered_and_a_lost_one_is_sent_again_with_its_number(stub, model):
    stub.fail(f"{M}/step", Drop(), Status(503, headers={"Retry-After": "0"}))
    model.step()
    model.step()
    model.zero_grad()
    assert numbers(stub) == [1, 1, 1, 2]
    assert numbers(stub, "zero_grad") == [3]


def test_each_adapter_has_numbers_of_its_own_whatever_the_handle(stub, client, model):
    other = MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=client)
    other.add_adapter_to_model("second", LoraConfig())
    model.add_adapter_to_model("third", LoraConfig())
    model.step(adapter_name="default")
    other.step()
    model.step(adapter_name="default")
    model.step()
    assert numbers(stub) == [1, 1, 2, 1]


def test_a_body_that_cannot_be_sent_takes_no_number(stub, model):
    with pytest.raises(InvalidRequestError, match="advantages"):
        model.forward_backward(inputs=[], advantages=[float("nan")])
    model.step()
    assert numbers(stub) == [1]


def test_refused_requests_take_a_number_where_the_server_says_so(stub, model):
    for code, kind in ((400, InvalidRequestError), (500, ServerError)):
        stub.fail(f"{M}/step", Status(code, {"detail": "no"}, {"X-Twinkle-Seq-Id": "1"}))
        with pytest.raises(kind):
            model.step()
    stub.fail(f"{M}/step", Status(409, {"detail": "another has it"}))
    with pytest.raises(InvalidRequestError):
        model.step()
    model.step()
    assert numbers(stub) == [1, 2, 3, 4]


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 410, 413, 422, 500, 302])
def test_what_was_refused_before_its_number_was_looked_at_leaves_it_to_the_next(stub, model, code):
    stub.fail(f"{M}/step", Status(code, {"detail": "no"}))
    with pytest.raises(TwinkleClientError):
        model.step()
    model.zero_grad()
    assert (numbers(stub), numbers(stub, "zero_grad")) == ([1], [1])


@pytest.mark.parametrize("code", [429, 507])
def test_what_waiting_did_not_help_leaves_its_number_to_the_next(stub, connect, model, code):
    impatient = MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=connect(retry_deadline=0))
    impatient.add_adapter_to_model("default", LoraConfig())
    stub.fail(f"{M}/step", Status(code))
    with pytest.raises(TwinkleClientError):
        impatient.step()
    impatient.zero_grad()
    assert (numbers(stub), numbers(stub, "zero_grad")) == ([1], [1])


@pytest.mark.parametrize("code", [408, 502, 503, 504, 524])
def test_a_request_that_may_have_arrived_keeps_its_number_and_goes_first(stub, connect, model, code):
    impatient = MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=connect(retry_deadline=0))
    impatient.add_adapter_to_model("default", LoraConfig())
    stub.fail(f"{M}/step", Status(code))
    with pytest.raises(TwinkleClientError):
        impatient.step()
    impatient.zero_grad()
    assert (numbers(stub), numbers(stub, "zero_grad")) == ([1, 1], [2])


def test_an_answer_that_nobody_can_read_was_an_answer(stub, model):
    stub.fail(f"{M}/step", Status(200, b"<html>"))
    with pytest.raises(ServerError):
        model.step()
    model.step()
    assert numbers(stub) == [1, 2]


def test_a_closed_client_uses_no_numbers(stub, model):
    model.client.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        model.step()
    assert model.client.sequence(model.model_id, "default")._number == 1


def test_a_request_of_unknown_fate_keeps_its_number(stub, connect, model):
    """After a call without an answer, the same call repeats the request.

    Any other call first repeats the lost request.
    """
    impatient = MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=connect(retry_deadline=0))
    impatient.add_adapter_to_model("default", LoraConfig())
    stub.fail(f"{M}/step", Drop())
    with pytest.raises(ConnectionLostError):
        impatient.step()
    impatient.step()
    assert numbers(stub) == [1, 1]
    stub.fail(f"{M}/step", Drop())
    with pytest.raises(ConnectionLostError):
        impatient.step()
    impatient.zero_grad()
    assert numbers(stub) == [1, 1, 2, 2]
    assert numbers(stub, "zero_grad") == [3]
    assert stub.requests[-2].path.endswith("/step")


def test_threads_number_one_after_another(stub, model):
    together = threading.Barrier(6)

    def step(_):
        together.wait()
        model.step()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(step, range(6)))
    assert numbers(stub) == [1, 2, 3, 4, 5, 6]
