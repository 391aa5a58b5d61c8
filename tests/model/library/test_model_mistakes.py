"""Mistakes that users make with the library's models: reported at once, without leaving anything behind."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from tests.support.models.plain_training import LORA, MODEL
from twinkle.errors import CheckpointError, InvalidInputError, UnknownNameError, UserError
from twinkle.metric import Metric
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.library.interface import TwinkleModel

NAME = "tenant-1"


def feature(tokens: int = 5, **changed: object) -> dict[str, object]:
    ids = list(range(5, 6 + tokens))
    return {"input_ids": ids, "labels": [*ids[1:], -100], **changed}


def make(kind: type[TwinkleModel], **options: object) -> Any:
    return kind(**{"model_id": MODEL, "mixed_precision": "fp32", "device": "cpu", **options})


@pytest.fixture(params=[TransformersModel, MultiLoraTransformersModel], ids=["plain", "multi_lora"])
def model(request) -> Any:
    made = make(request.param)
    made.add_adapter_to_model(NAME, peft.LoraConfig(**LORA))
    made.set_optimizer("AdamW", lr=1e-3, adapter_name=NAME)
    return made


def run(model: Any, *inputs: object, **arguments: object) -> dict[str, Any]:
    return model.forward_backward(inputs=list(inputs), adapter_name=NAME, **arguments)


BATCHES = {
    "no labels": ({"input_ids": [5, 6]}, "labels"),
    "a token that does not exist": (feature(input_ids=[5, 6, 7, 8, 9, 10**6]), "1000000, allowed: .*0"),
    "a label that does not exist": (feature(labels=[10**6] * 6), "1000000, allowed: .*0"),
    "a label of another ignore_index": (feature(labels=[-1] * 6), "got -1"),
    "fractions": (feature(input_ids=[0.5] * 6), "input_ids"),
    "labels of another length": (feature(labels=[6, 7]), "inputs.labels: got '2 entries', allowed: 6"),
    "pairs": ({"positive": {"messages": [{"role": "user", "content": "?"}]}}, "'positive' and 'negative' in turn"),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_wrong_batches_are_refused(model, batch):
    row, message = BATCHES[batch]
    with pytest.raises(InvalidInputError, match=message):
        run(model, row)
    assert run(model, feature())["num_tokens"] == 5  # the model still works


def test_a_batch_without_targets_warns(model):
    with pytest.warns(UserWarning, match="every label of this batch is −100"):
        run(model, feature(labels=[-100] * 6))


def test_templates_for_datasets_cannot_drop_rows_of_a_batch(model):
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!" * 40}]
    model.set_template("Template", max_length=30, truncation_strategy="delete", adapter_name=NAME)
    with pytest.raises(InvalidInputError, match="1 trajectories, of which the template makes 0"):
        run(model, {"messages": chat})


@pytest.mark.parametrize("name", ["lr", "step", "grad_norm", "loss_reduction"])
@pytest.mark.parametrize("loss", ["cross_entropy", lambda inputs, outputs, **_: {"loss": outputs["logps"].sum()}])
def test_what_metrics_get_from_the_model_nobody_else_gives(model, name, loss):
    model.set_loss(loss, adapter_name=NAME)
    with pytest.raises(UnknownNameError, match=f"argument of the loss and the metrics '{name}'"):
        run(model, feature(), **{name: 1.0})


def test_a_metric_that_refuses_a_batch_does_so_once(model):
    model.add_metric("DPOMetric", is_training=True, adapter_name=NAME)
    run(model, feature())  # one sequence is not a pair
    with pytest.raises(InvalidInputError, match="an even number"):
        run(model, feature(), feature())
    run(model, feature(), feature())


def test_metrics_of_the_user_get_mesh_and_group(model):
    class Own(Metric):
        def __init__(self, device_mesh, process_group, **options):
            self.options = options
            super().__init__(device_mesh, process_group)

        def accumulate(self, inputs, outputs, **_):
            pass

        def calculate(self):
            return {"own": (self.device_mesh, self.process_group, self.options)}

        def reset(self):
            pass

    class Small(Own):  # takes neither, which is enough in one process
        def __init__(self, factor=2, other=3):
            super().__init__(None, None, factor=factor, other=other)

    for metric, options, expected in (
        (Own, {"factor": 5}, {"factor": 5}),
        (Small, {"factor": 5}, {"factor": 5, "other": 3}),
        (Small, {}, {"factor": 2, "other": 3}),
    ):
        model.add_metric(metric, is_training=False, adapter_name=NAME, **options)
        assert model.calculate_metric(is_training=False, adapter_name=NAME)["own"] == (None, None, expected)
    with pytest.raises(InvalidInputError, match="device_mesh: got 1, allowed: nothing"):
        model.add_metric(Own, adapter_name=NAME, device_mesh=1)


def test_evaluation_reports_a_loss_if_one_was_computed(model):
    model.forward_only(inputs=[feature()], adapter_name=NAME)
    assert "loss" not in model.calculate_metric(is_training=False, adapter_name=NAME)
    model.forward_only(inputs=[feature()], adapter_name=NAME)
    value = model.calculate_loss(adapter_name=NAME)
    result = model.calculate_metric(is_training=False, adapter_name=NAME)
    assert float(result["loss"]) == pytest.approx(value / 5, abs=1e-3)  # the sum over five labels


LOSSES: dict[str, Callable[..., Any]] = {
    "a tensor": lambda inputs, outputs: outputs["logps"].sum(),
    "no num_tokens": lambda inputs, outputs: {"loss": outputs["logps"].sum()},
    "a number": lambda inputs, outputs: {"loss": 1.0, "num_tokens": 0},
    "one a token": lambda inputs, outputs: {"loss": outputs["logps"], "num_tokens": 0},
}


@pytest.mark.parametrize("returned", LOSSES)
def test_functions_that_are_no_losses_are_refused(model, returned):
    model.set_loss(LOSSES[returned], adapter_name=NAME)
    with pytest.raises(InvalidInputError, match=r"allowed: \{'loss': a tensor of one number"):
        run(model, feature())


SETTINGS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a loss that is no loss": (lambda m: m.set_loss(dict, adapter_name=NAME), "Loss: got <class 'dict'>"),
    "a loss without its option": (
        lambda m: m.set_loss("chunked_cross_entropy", adapter_name=NAME),
        "options of ChunkedCrossEntropyLoss: .*also chunk_size",
    ),
    "a metric that is none": (lambda m: m.add_metric("Metric", adapter_name=NAME), "unknown Metric 'Metric'"),
    "a rate as text": (lambda m: m.set_optimizer("AdamW", lr="1e-4", adapter_name=NAME), "lr: got '1e-4'"),
    "a negative rate": (lambda m: m.set_optimizer("AdamW", lr=-1.0, adapter_name=NAME), "lr: got -1.0"),
    "a schedule without steps": (
        lambda m: m.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, adapter_name=NAME),
        "options of LinearWarmupScheduler: .*also num_training_steps",
    ),
    "steps as text": (
        lambda m: m.set_lr_scheduler(
            "LinearWarmupScheduler", num_warmup_steps=1, num_training_steps="9", adapter_name=NAME
        ),
        "num_training_steps: got '9'",
    ),
    "a negative norm": (lambda m: m.clip_grad_norm(-1.0, adapter_name=NAME), "max_grad_norm: got -1.0"),
    "a norm of nothing": (lambda m: m.clip_grad_norm(1.0, 0, adapter_name=NAME), "norm_type: got 0"),
    "a step uphill": (lambda m: m.step(optim_params={"lr": -1}, adapter_name=NAME), "optim_params.lr: got -1"),
    "one beta": (
        lambda m: m.step(optim_params={"lr": 1e-3, "betas": 0.9}, adapter_name=NAME),
        "optim_params.betas: got 0.9",
    ),
    "a save every 0 steps": (lambda m: m.save("x", interval=0, adapter_name=NAME), "interval: got 0"),
    "an adapter of nothing": (lambda m: m.add_adapter_to_model("b-1", 3), "config_or_dir: got 3"),
    "an adapter with a wrong field": (lambda m: m.add_adapter_to_model("b-1", {"rank": 3}), "rank"),
    "an adapter on no module": (
        lambda m: m.add_adapter_to_model("b-1", peft.LoraConfig(target_modules=["nope"])),
        "nope",
    ),
    "a window of 0": (
        lambda m: m.add_adapter_to_model("b-1", peft.LoraConfig(**LORA), gradient_accumulation_steps=0),
        "gradient_accumulation_steps: got 0",
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_wrong_settings_are_refused(model, setting):
    do, message = SETTINGS[setting]
    with pytest.raises(UserError, match=message):
        do(model)
    model.add_adapter_to_model("b-1", peft.LoraConfig(**LORA))  # the failed call added no adapter


def test_one_advantage_is_not_one_for_each(model):
    model.set_loss("grpo", adapter_name=NAME)
    with pytest.raises(InvalidInputError, match=r"advantages: got 1\.0"):
        run(model, feature(), advantages=1.0)


def test_checkpoints_of_another_optimizer_or_schedule_are_refused(model, tmp_path):
    run(model, feature())
    where = model.save("x", str(tmp_path), save_optimizer=True, adapter_name=NAME)
    model.set_optimizer("Adam", adapter_name=NAME)
    with pytest.raises(CheckpointError, match=r"optimizer.pt is of a AdamW; set_optimizer made a Adam"):
        model.resume_from_checkpoint(where, adapter_name=NAME)


@pytest.mark.parametrize("resume_only_model", [False, True])
def test_a_checkpoint_that_is_not_there(model, resume_only_model):
    with pytest.raises(CheckpointError, match="no-such"):
        model.resume_from_checkpoint("no-such", resume_only_model=resume_only_model, adapter_name=NAME)


def test_weights_alone_start_the_optimizer_anew(model, tmp_path):
    """After loading, the first update is that of a fresh optimizer, without moments of other weights."""
    where = model.save("x", str(tmp_path), adapter_name=NAME)

    def update() -> dict[str, torch.Tensor]:
        model.load(where, adapter_name=NAME)
        run(model, feature())
        model.clip_grad_and_step(adapter_name=NAME)
        return {name: tensor.clone() for name, tensor in model.get_state_dict(adapter_name=NAME).items()}

    first, second = update(), update()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("changed", [{"r": 2}, {"lora_alpha": 64}])
def test_adapters_of_another_scale_are_refused(model, tmp_path, changed):
    where = model.save("x", str(tmp_path), adapter_name=NAME)
    model.add_adapter_to_model("b-1", peft.LoraConfig(**{**LORA, **changed}))
    with pytest.raises(CheckpointError, match=r"does not fit|holds rank"):
        model.load(where, adapter_name="b-1")


# --- only for the plain model -----------------------------------------------------------------------------------------


def test_what_was_set_before_an_adapter_is_not_lost_in_silence():
    model = make(TransformersModel)
    model.set_loss("grpo")
    with pytest.raises(UserError, match="set_loss came before it"):
        model.add_adapter_to_model(NAME, peft.LoraConfig(**LORA))


def test_a_first_adapter_that_fails_leaves_the_model_trainable():
    model = make(TransformersModel, mixed_precision="bf16")
    before = {name: (p.dtype, p.requires_grad) for name, p in model.model.named_parameters()}
    with pytest.raises(InvalidInputError, match="nope"):
        model.add_adapter_to_model(NAME, peft.LoraConfig(target_modules=["nope"]))
    assert {name: (p.dtype, p.requires_grad) for name, p in model.model.named_parameters()} == before


def test_frozen_adapters_cannot_be_trained():
    model = make(TransformersModel)
    model.add_adapter_to_model(NAME, peft.LoraConfig(**LORA), is_trainable=False)
    with pytest.raises(UserError, match=f"depends on nothing that is trained; '{NAME}' is frozen"):
        run(model, feature())


def test_names_with_dots_are_refused():
    with pytest.raises(InvalidInputError, match=r"adapter_name: got 'v1\.0'"):
        make(TransformersModel).add_adapter_to_model("v1.0", peft.LoraConfig(**LORA))


# --- many adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_loras": "5"}, {"max_r": 0}, {"max_length": -1}, {"lora_config": 3}])
def test_limits_are_numbers(limit):
    with pytest.raises(InvalidInputError, match=next(iter(limit))):
        make(MultiLoraTransformersModel, **limit)


def test_two_adapters_have_templates_of_their_own(model):
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    model.add_adapter_to_model("b-1", peft.LoraConfig(**LORA))
    model.set_template("Template", default_system="Be brief.", adapter_name=NAME)
    lengths = {name: model.forward_only(inputs=[chat], adapter_name=name)["logps"].shape[1] for name in (NAME, "b-1")}
    assert lengths[NAME] > lengths["b-1"]
    assert isinstance(model.forward_only(inputs=[chat], adapter_name=NAME)["logps"], torch.Tensor)
