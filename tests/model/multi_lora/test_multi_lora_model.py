"""The multi-LoRA model, compared with plain transformers, PEFT and torch.optim, in fp32 on a small random Llama."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import Tensor

from tests.support.models.plain_training import LORA, MODEL, PlainLora, assert_close, features, logps, plain_model
from twinkle.errors import (
    AdapterExistsError,
    CapacityError,
    CheckpointError,
    InvalidInputError,
    NonFiniteError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)
from twinkle.loss import DPOLoss, GRPOLoss
from twinkle.model import MultiLoraTransformersModel

A = "a-1"


@pytest.fixture(scope="module")
def shared() -> MultiLoraTransformersModel:
    return MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=3)


@pytest.fixture
def model(shared) -> MultiLoraTransformersModel:
    """A model with one adapter in which A and B are both random. At B = 0 the gradient of A would hide mistakes."""
    for name in list(shared.optimizer_group):
        shared.remove_adapter(name)
    add(shared, A)
    return shared


def add(model, name, seed=0, **options):
    model.add_adapter_to_model(name, peft.LoraConfig(**LORA), **options)
    snapshot = model.trainer.snapshot(name)
    noise = torch.randn(snapshot.weights.shape, generator=torch.Generator().manual_seed(seed)).numpy() * 0.05
    layout = model.trainer.pool.get(name).layout
    row = torch.from_numpy(noise)
    for target in layout.targets:  # the padding of the rank bucket stays zero
        a_RI, b_OR = layout.views(row, target.name)
        a_RI[LORA["r"] :], b_OR[:, LORA["r"] :] = 0, 0
    model.trainer.restore(name, type(snapshot)(**{**vars(snapshot), "weights": row.numpy()}))


def gradients(model, name=A) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in model.trainer.gradients(name).items()}


def plain_of(model, name=A) -> PlainLora:
    return PlainLora(model.get_state_dict(adapter_name=name))


def masked(labels: Tensor, values: Tensor) -> Tensor:
    return torch.where(labels != -100, values, 0.0)


# --- LoRA options -----------------------------------------------------------------------------------------------------


def test_forward_and_backward_drop_what_forward_backward_drops(model):
    """Also over several passes, and with an evaluation in between; test_lora_options.py compares with PEFT."""
    config = peft.LoraConfig(**{**LORA, "lora_dropout": 0.4, "use_rslora": True, "init_lora_weights": False})
    for name in ("b", "c"):
        model.add_adapter_to_model(name, config, seed=3)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    for step in range(2):
        batch = features(9, 14, seed=step)
        together = model.forward_backward(inputs=batch, adapter_name="b")
        parted = model.forward(inputs=batch, adapter_name="c")
        torch.testing.assert_close(parted["logps"], together["logps"], atol=1e-5, rtol=1e-5)
        evaluated = model.forward_only(inputs=batch, adapter_name="b")["logps"]
        assert (evaluated - together["logps"]).abs().max() > 1e-3
        assert torch.equal(model.forward_only(inputs=batch, adapter_name="b")["logps"], evaluated)
        model.calculate_loss(adapter_name="c")
        model.backward(adapter_name="c")
        assert_close(gradients(model, "c"), gradients(model, "b"))
        for name in ("b", "c"):
            model.clip_grad_and_step(adapter_name=name)


def test_a_rank_above_max_r_is_refused_by_module(model):
    config = peft.LoraConfig(**{**LORA, "rank_pattern": {"0.self_attn.q_proj": 64}})
    with pytest.raises(InvalidInputError, match=r"^the rank of model\.layers\.0\.self_attn\.q_proj: got 64, .* max_r$"):
        model.add_adapter_to_model("b", config)
    model.add_adapter_to_model("b", peft.LoraConfig(**{**LORA, "rank_pattern": {"0.self_attn.q_proj": 32}}))
    assert "rank_pattern: {'0.self_attn.q_proj': 32}" in model.get_train_configs(adapter_name="b")


# --- one pass ---------------------------------------------------------------------------------------------------------


def test_cross_entropy_and_its_gradient(model):
    plain, batch = plain_of(model), features(9, 14, 6)
    outputs = model.forward_backward(inputs=batch, adapter_name=A)
    labels, theirs, _ = logps(plain.model, batch)
    loss = -masked(labels, theirs).sum()
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert outputs["num_tokens"] == (labels != -100).sum()
    assert torch.allclose(outputs["logps"], theirs.detach(), atol=1e-5)
    assert_close(gradients(model), plain.gradients())


def test_separate_verbs_equal_forward_backward(model):
    batch = features(9, 14)
    model.set_loss("GRPOLoss", adapter_name=A)
    whole = model.forward_backward(inputs=batch, adapter_name=A, advantages=[1.0, -0.5])
    together = gradients(model)
    model.zero_grad(adapter_name=A)
    model.forward(inputs=batch, adapter_name=A, advantages=[1.0, -0.5])
    assert gradients(model) == {}
    loss = model.calculate_loss(adapter_name=A)
    model.backward(adapter_name=A)
    assert loss == pytest.approx(whole["loss"], abs=1e-7)
    assert_close(gradients(model), together, 1e-6)


def dpo(plain: PlainLora, batch, reference: Tensor) -> Tensor:
    labels, lp, _ = logps(plain.model, batch)
    sums, base = masked(labels, lp).sum(1), masked(labels, reference).sum(1)
    margin = 0.3 * ((sums - base)[0::2] - (sums - base)[1::2])
    return -torch.nn.functional.logsigmoid(margin).mean()


def grpo(plain: PlainLora, batch, old: Tensor) -> Tensor:
    labels, lp, _ = logps(plain.model, batch)
    advantages = torch.tensor([1.0, -0.7, 0.4, 2.0])[:, None]
    ratio = torch.exp(lp - old)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mask = labels != -100
    return ((terms * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize("limit", [None, 24], ids=["one batch", "several batches"])
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_losses_over_whole_requests(name, limit):
    """The loss needs the log-probabilities of all sequences, even if they do not fit in one batch."""
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_tokens_per_batch=limit)
    add(model, A)
    plain, batch = plain_of(model), features(9, 14, 6, 11)
    reference = model.forward_only(inputs=batch, adapter_name=A, disable_lora=True)["logps"]
    if name == "dpo":
        model.set_loss(DPOLoss(beta=0.3), adapter_name=A)
        outputs = model.forward_backward(inputs=batch, adapter_name=A, ref_logps=reference)
        loss = dpo(plain, batch, reference)
    else:
        model.set_loss(GRPOLoss, adapter_name=A)
        kwargs = {"advantages": [1.0, -0.7, 0.4, 2.0], "old_logps": reference}
        outputs = model.forward_backward(inputs=batch, adapter_name=A, **kwargs)
        loss = grpo(plain, batch, reference)
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients(model), plain.gradients())


@pytest.mark.parametrize("limit", [None, 16], ids=["one batch", "several batches"])
def test_entropy_and_temperature(limit):
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_tokens_per_batch=limit)
    add(model, A)
    plain, batch = plain_of(model), features(9, 7)
    model.set_loss("grpo", entropy_coef=0.2, adapter_name=A)
    outputs = model.forward_backward(inputs=batch, adapter_name=A, advantages=[1.0, -1.0], temperature=0.7)
    labels, lp, logits = logps(plain.model, batch, temperature=0.7)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    mask = labels != -100
    terms = -torch.exp(lp - lp.detach()) * torch.tensor([1.0, -1.0])[:, None] - 0.2 * entropy
    loss = ((terms * mask).sum(1) / mask.sum(1)).mean()
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(outputs["entropies"][mask], entropy[mask].detach(), atol=1e-5)
    assert_close(gradients(model), plain.gradients())


def test_packed_and_padded_features_are_the_same(model):
    first, second = features(9, 5)
    model.forward_backward(inputs=[first, second], adapter_name=A)
    expected = gradients(model)
    model.zero_grad(adapter_name=A)
    packed = {
        "input_ids": first["input_ids"] + second["input_ids"],
        "labels": first["labels"] + second["labels"],
        "position_ids": [*range(9), *range(5)],
    }
    outputs = model.forward_backward(inputs=packed, adapter_name=A)
    assert outputs["logps"].shape == (2, 9)
    assert_close(gradients(model), expected, 1e-6)
    model.zero_grad(adapter_name=A)
    model.set_processor("InputProcessor", padding_free=True, adapter_name=A)
    model.forward_backward(inputs=[first, second], adapter_name=A)
    assert_close(gradients(model), expected, 1e-6)


@pytest.mark.parametrize(("field", "row"), [("input_ids", 0), ("labels", 1)])
def test_errors_name_the_fields_of_rows(model, field, row):
    """The trainer's datum has other names (``data[1].targets``), which nobody has given it here."""
    rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]} for _ in range(2)]
    rows[row][field] = [1, 10**6, 3]
    with pytest.raises(InvalidInputError, match=rf"^{field} of sequence {row}: got 1000000, allowed: token ids in"):
        model.forward_backward(inputs=rows, adapter_name=A)


def test_trajectories_are_encoded(model):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    outputs = model.forward_only(inputs={"messages": turns}, adapter_name=A)
    model.calculate_loss(adapter_name=A)
    assert outputs["num_tokens"] == len("four<")
    assert outputs["loss"] > 0


def test_a_template_is_made_for_the_models_tokenizer(model):
    model.set_template("Template", max_length=6, truncation_strategy="right", adapter_name=A)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    assert model.forward_only(inputs=[{"messages": turns}], adapter_name=A)["logps"].shape == (1, 6)


def test_disable_lora_is_the_base_model(model):
    batch = features(8, 3)
    base = model.forward_only(inputs=batch, adapter_name=A, disable_lora=True)["logps"]
    plain = plain_of(model)
    with torch.no_grad(), plain.model.disable_adapter():
        _, expected, _ = logps(plain.model, batch)
    assert torch.allclose(base, expected, atol=1e-5)
    assert not torch.allclose(model.forward_only(inputs=batch, adapter_name=A)["logps"], expected, atol=1e-3)


def test_accuracy_counts_the_likeliest_tokens(model):
    batch = features(30, 20)
    _, _, logits = logps(plain_of(model).model, batch)
    labels = [list(row["labels"]) for row in batch]
    labels[0][5] = int(logits[0, 5].argmax())
    labels[1][9] = int(logits[1, 9].argmax())
    model.add_metric("Accuracy", adapter_name=A)
    changed = [{**row, "labels": own} for row, own in zip(batch, labels, strict=True)]
    model.forward_backward(inputs=changed, adapter_name=A)
    metrics = model.calculate_metric(is_training=True, adapter_name=A)
    expected = sum(
        int(logits[i, t].argmax()) == label for i, own in enumerate(labels) for t, label in enumerate(own) if label >= 0
    )
    assert metrics["correct_tokens"] == expected >= 2


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam"])
@pytest.mark.parametrize("clipping", [True, False])
def test_training_loop_equals_torch(model, optimizer, clipping):
    """Compares losses and weights over four updates: uneven windows of two passes, a schedule, weight decay."""
    plain = plain_of(model)
    model.set_optimizer(optimizer, lr=2e-3, weight_decay=0.1, betas=(0.8, 0.9), adapter_name=A)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=6, adapter_name=A)
    theirs = getattr(torch.optim, optimizer)(plain.parameters.values(), lr=2e-3, weight_decay=0.1, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, model.optimizer_group[A].lr_scheduler.lr_lambdas[0])
    for step in range(1, 9):
        batch = features(4 + step, 13 - step, seed=step)
        before = model.get_state_dict(adapter_name=A)
        outputs = model.forward_backward(inputs=batch, adapter_name=A, gradient_accumulation_steps=2)
        labels, lp, _ = logps(plain.model, batch)
        loss = -masked(labels, lp).sum()
        loss.backward()
        assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
        tokens = (labels != -100).sum() if step % 2 else tokens + (labels != -100).sum()  # noqa: F821
        if clipping:
            norm = model.clip_grad_and_step(0.1, adapter_name=A)
        else:
            norm = model.step(adapter_name=A), model.zero_grad(adapter_name=A), model.lr_step(adapter_name=A)
        if step % 2:
            assert clipping is False or norm is None
            assert_close(model.get_state_dict(adapter_name=A), before, 0.0)
            continue
        for parameter in plain.parameters.values():
            parameter.grad /= tokens
        if clipping:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters.values(), 0.1)
            assert norm == pytest.approx(expected.item(), rel=1e-4)
        theirs.step()
        theirs.zero_grad()
        schedule.step()
        assert model.optimizer_group[A].lr == pytest.approx([group["lr"] for group in theirs.param_groups])
        assert_close(model.get_state_dict(adapter_name=A), {n: p.detach() for n, p in plain.parameters.items()}, 5e-5)


def test_mean_losses_are_averaged_over_the_window(model):
    model.set_loss("cross_entropy", reduction="mean", adapter_name=A)
    parts, batches = [], [features(6, seed=1), features(13, seed=2)]
    for batch in batches:
        model.forward_backward(inputs=batch, adapter_name=A)
        parts.append(gradients(model))
        model.zero_grad(adapter_name=A)
    for batch in batches:
        model.forward_backward(inputs=batch, adapter_name=A, gradient_accumulation_steps=2)
    model.clip_grad_norm(1e9, adapter_name=A)
    assert_close(gradients(model), {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}, 1e-6)


def test_updates_come_after_exactly_g_backward_passes(model):
    model.set_optimizer("AdamW", lr=1e-3, adapter_name=A)
    steps = []
    for _ in range(7):
        model.forward_backward(inputs=features(6), adapter_name=A, gradient_accumulation_steps=3)
        model.clip_grad_and_step(adapter_name=A)
        steps.append(model.trainer.step_count(A))
    assert steps == [0, 0, 1, 1, 1, 2, 2]


def test_optim_params_set_the_rate_of_a_step(model):
    model.set_optimizer("AdamW", lr=1.0, weight_decay=0.0, adapter_name=A)
    before = model.get_state_dict(adapter_name=A)
    model.forward_backward(inputs=features(6), adapter_name=A)
    model.step(adapter_name=A, optim_params={"lr": 0.0})
    assert_close(model.get_state_dict(adapter_name=A), before, 0.0)
    with pytest.raises(UnknownNameError, match="learning_rate"):
        model.step(adapter_name=A, optim_params={"learning_rate": 0.1})


# --- state ------------------------------------------------------------------------------------------------------------


def train(model, name, start, stop) -> list[float]:
    losses = []
    for step in range(start, stop):
        inputs = features(5 + step, 12 - step, seed=step)
        losses.append(model.forward_backward(inputs=inputs, adapter_name=name)["loss"])
        model.clip_grad_and_step(adapter_name=name, gradient_accumulation_steps=2)
    return losses


def prepare(model, name):
    model.set_optimizer("AdamW", lr=5e-3, adapter_name=name)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=8, adapter_name=name)


@pytest.mark.parametrize("when", [2, 3], ids=["between windows", "inside a window"])
def test_resume_equals_continue(model, tmp_path, when):
    prepare(model, A)
    train(model, A, 0, when)
    where = model.save("mid", str(tmp_path), adapter_name=A, save_optimizer=True, consumed_train_samples=2 * when)
    drawn, expected = torch.rand(1), train(model, A, when, 8)
    other = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")
    other.add_adapter_to_model("b-1", peft.LoraConfig(**LORA))
    prepare(other, "b-1")
    progress = other.resume_from_checkpoint(where, adapter_name="b-1")
    assert progress == {"cur_step": when, "consumed_train_samples": 2 * when, "gradient_accumulation_steps": 2}
    assert torch.equal(torch.rand(1), drawn)
    assert train(other, "b-1", when, 8) == expected  # bit for bit
    assert_close(other.get_state_dict(adapter_name="b-1"), model.get_state_dict(adapter_name=A), 0.0)
    (Path(where) / "optimizer.pt").write_text("root:x:0:0:root:/root:/bin/bash\n" * 9)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        other.resume_from_checkpoint(where, adapter_name="b-1")


def test_saved_adapters_are_pefts(model, tmp_path):
    where = model.save("x", str(tmp_path), adapter_name=A)
    plain = plain_of(model)
    loaded = peft.PeftModel.from_pretrained(plain.model.unload(), where)
    batch = features(8)
    with torch.no_grad():
        _, theirs, _ = logps(loaded, batch)
    ours = model.forward_only(inputs=batch, adapter_name=A)["logps"]
    assert torch.allclose(ours, theirs, atol=1e-5)
    add(model, "b-1", seed=5)
    model.load("x", str(tmp_path), adapter_name="b-1")
    assert_close(model.get_state_dict(adapter_name="b-1"), model.get_state_dict(adapter_name=A), 0.0)
    with pytest.raises(UserError, match="save_optimizer"):
        model.resume_from_checkpoint(where, adapter_name="b-1")


def test_save_waits_for_its_interval(model, tmp_path):
    model.forward_backward(inputs=features(5), adapter_name=A)
    assert model.save(output_dir=str(tmp_path), interval=2, adapter_name=A) is None
    model.forward_backward(inputs=features(5), adapter_name=A)
    assert model.save(output_dir=str(tmp_path), interval=2, adapter_name=A) == str(tmp_path / "checkpoint-step-2")


def test_a_seeded_program_gets_the_same_adapter(model):
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        model.add_adapter_to_model("b-1", peft.LoraConfig(**LORA))
        made.append(model.get_state_dict(adapter_name="b-1"))
        model.remove_adapter("b-1")
    assert_close(*made, 0.0)


def test_adapters_do_not_meet(model):
    add(model, "b-1", seed=7)
    for name in (A, "b-1"):
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    before = model.get_state_dict(adapter_name="b-1")
    model.forward(inputs=features(9), adapter_name="b-1")
    model.forward_backward(inputs=features(7), adapter_name=A)
    model.clip_grad_and_step(adapter_name=A)
    assert_close(model.get_state_dict(adapter_name="b-1"), before, 0.0)
    assert gradients(model, "b-1") == {}
    model.calculate_loss(adapter_name="b-1")  # its own forward pass is still there
    model.backward(adapter_name="b-1")
    plain = plain_of(model, "b-1")
    labels, lp, _ = logps(plain.model, features(9))
    (-masked(labels, lp).sum()).backward()
    assert_close(gradients(model, "b-1"), plain.gradients())


# --- metrics and sides ------------------------------------------------------------------------------------------------


def test_evaluation_leaves_training_alone(model):
    model.forward_backward(inputs=features(6, 9), adapter_name=A)
    grads, trained = gradients(model), model.optimizer_group[A].train_status.outputs["loss"]
    model.forward_only(inputs=features(12, seed=3), adapter_name=A)
    evaluated = model.calculate_loss(adapter_name=A)
    with pytest.raises(UserError, match="backward"):
        model.backward(adapter_name=A)
    assert_close(gradients(model), grads, 0.0)
    tokens = 9  # 12 labels without two of the prompt and the last one
    assert model.calculate_metric(False, adapter_name=A)["loss"] == f"{evaluated / tokens:.4f}"
    assert model.calculate_metric(True, adapter_name=A)["loss"] == f"{trained / (3 + 6):.4f}"
    assert "loss" not in model.calculate_metric(True, adapter_name=A)  # reset
    with pytest.raises(UserError, match="forward"):
        model.calculate_loss(adapter_name=A)


def test_a_loss_that_is_not_finite_keeps_nothing(model):
    def broken(inputs, outputs, **_):
        return {"loss": outputs["logps"].sum() * float("inf"), "num_tokens": 0}

    model.forward_backward(inputs=features(6), adapter_name=A)
    before = gradients(model)
    model.set_loss(broken, adapter_name=A)
    with pytest.raises(NonFiniteError):
        model.forward_backward(inputs=features(6), adapter_name=A)
    assert_close(gradients(model), before, 0.0)
    assert model.optimizer_group[A].cur_step == 1


def test_resuming_uses_the_state_that_is_there(model, tmp_path, monkeypatch):
    """Files that are missing are named in one line, and their state starts anew; the rest is restored."""
    model.set_optimizer("AdamW", lr=5e-3, adapter_name=A)
    model.set_lr_scheduler("StepLR", step_size=1, adapter_name=A)
    model.forward_backward(inputs=features(7), adapter_name=A)
    model.clip_grad_and_step(adapter_name=A)
    where = Path(str(model.save("mid", str(tmp_path), adapter_name=A, save_optimizer=True)))
    for name in ("optimizer.pt", "scheduler.pt", "optimizer.safetensors"):
        (where / name).unlink()
    saved = model.get_state_dict(adapter_name=A)
    add(model, "b-1", seed=5)
    model.set_optimizer("AdamW", lr=7e-3, adapter_name="b-1")
    model.set_lr_scheduler("StepLR", step_size=1, adapter_name="b-1")
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr("twinkle.model.library.training_state.logger", logger)
    progress = model.resume_from_checkpoint(where, adapter_name="b-1")
    assert len(said) == 1
    assert "optimizer.pt and no scheduler.pt and no moments" in said[0]
    assert progress["cur_step"] == 1
    assert model.trainer.step_count("b-1") == 0
    assert model.optimizer_group["b-1"].lr == [7e-3]
    assert_close(model.get_state_dict(adapter_name="b-1"), saved, 0.0)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.set_loss("crossentropy", adapter_name=A), UnknownNameError, "cross_entropy"),
        (lambda m: m.set_optimizer("LBFGS", adapter_name=A), UnknownNameError, "Adam, AdamW"),
        (lambda m: m.set_optimizer("SGD", adapter_name=A, momentum=-1.0), ValueError, "momentum"),
        (lambda m: m.set_optimizer("SGD", adapter_name=A, momentum=float("nan")), InvalidInputError, "momentum"),
        (lambda m: m.set_optimizer("NAdam", adapter_name=A, eps=0.0), InvalidInputError, "eps"),
        (lambda m: m.set_optimizer("AdamW", adapter_name=A, beta=1), UnknownNameError, "betas"),
        (lambda m: m.set_optimizer("AdamW", adapter_name=A, amsgrad=True), UnsupportedError, "amsgrad"),
        (lambda m: m.set_lr_scheduler("StepLR", adapter_name=A, step_size=1), UserError, "set_optimizer"),
        (lambda m: m.set_template("Tmplate", adapter_name=A), UnknownNameError, "Template"),
        (lambda m: m.set_processor("InputProcesor", adapter_name=A), UnknownNameError, "InputProcessor"),
        (lambda m: m.add_metric("Acuracy", adapter_name=A), UnknownNameError, "Accuracy"),
        (lambda m: m.step(adapter_name=A), UserError, "set_optimizer"),
        (lambda m: m.forward(inputs=features(4)), InvalidInputError, "adapter_name"),
        (lambda m: m.forward(inputs=features(4), adapter_name="z"), UnknownNameError, A),
        (lambda m: m.forward(inputs=[], adapter_name=A), InvalidInputError, "inputs"),
        (lambda m: m.forward(inputs=features(4), adapter_name=A, advantage=1), UnknownNameError, "advantage"),
        (lambda m: m.forward(inputs=features(4), adapter_name=A, temperature=0), InvalidInputError, "temperature"),
        (lambda m: m.add_adapter_to_model(A, peft.LoraConfig(**LORA)), AdapterExistsError, A),
        (lambda m: m.add_adapter_to_model("b", peft.LoraConfig(r=64)), InvalidInputError, "max_r"),
        (lambda m: m.add_adapter_to_model("b", "some/dir"), InvalidInputError, "LoraConfig"),
        (lambda m: m.load("nowhere", adapter_name=A), UserError, "nowhere"),
    ],
)
def test_mistakes_are_named(model, call: Callable, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        call(model)


def test_an_adapter_without_target_modules_gets_those_of_the_model(model):
    model.add_adapter_to_model("b-1", peft.LoraConfig(r=2))
    config = model.get_peft_config_dict(adapter_name="b-1")
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]
    )


@pytest.mark.parametrize("in_background", [True, False])
def test_uploads_are_private(model, tmp_path, monkeypatch, in_background):
    calls = []
    name = "async_push_to_hub" if in_background else "push_to_hub"
    monkeypatch.setattr(f"twinkle.hub.HubOperation.{name}", lambda *args, **kwargs: calls.append((args, kwargs)))
    model.upload_to_hub(str(tmp_path), "ms://me/it", "secret", async_upload=in_background)
    assert calls == [(("ms://me/it", str(tmp_path)), {"token": "secret", "private": True})]
    with pytest.raises(InvalidInputError, match="checkpoint_dir"):
        model.upload_to_hub(str(tmp_path / "none"), "ms://me/it")


def test_no_more_adapters_than_max_loras(model):
    add(model, "b-1")
    add(model, "c-1")
    with pytest.raises(CapacityError, match="max_loras"):
        add(model, "d-1")
    model.remove_adapter("b-1")
    add(model, "d-1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_config": {"a": 1}}, "fsdp_config entry 'a'"),
        ({"device_map": "auto"}, "option of MultiLoraTransformersModel 'device_map'; known: attn_implementation"),
        ({"torch_dtype": torch.float16}, "torch_dtype: got torch.float16, allowed: float32 or bfloat16"),
        ({"dtype": "bfloat16", "mixed_precision": "fp32"}, "dtype: got 'bfloat16', allowed: float32 or bfloat16, and"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises((InvalidInputError, UnknownNameError), match=message):
        MultiLoraTransformersModel(model_id=MODEL, **options)


def test_the_dtype_of_from_pretrained_is_the_precision():
    model = MultiLoraTransformersModel(model_id=MODEL, device="cpu", torch_dtype="float32", attn_implementation="eager")
    assert model.trainer.dtype == torch.float32


def test_train_configs_tell_what_is_trained(model):
    model.set_optimizer("AdamW", lr=3e-4, adapter_name=A)
    text = model.get_train_configs(adapter_name=A)
    assert "lora_alpha: 8" in text
    assert "AdamW, learning rate 0.0003" in text
    assert "3,328 parameters" in text


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("limit", [None, 24], ids=["one batch", "several batches"])
@pytest.mark.parametrize(("loss", "options"), [("dpo", {}), ("grpo", {}), ("grpo", {"entropy_coef": 0.2})])
def test_cuda_equals_cpu(tmp_path, loss, options, limit):
    plain_model().save_pretrained(tmp_path)  # a seed gives different weights on another device
    found = []
    for device in ("cpu", "cuda"):
        model = MultiLoraTransformersModel(
            model_id=str(tmp_path), mixed_precision="fp32", device=device, max_tokens_per_batch=limit
        )
        add(model, A)
        model.set_loss(loss, adapter_name=A, **options)
        model.add_metric("Accuracy", adapter_name=A)
        batch = features(9, 14, 6, 11)
        reference = model.forward_only(inputs=batch, adapter_name=A, disable_lora=True)["logps"]
        kwargs = {"ref_logps": reference} if loss == "dpo" else {"advantages": [1.0, -0.7, 0.4, 2.0]}
        outputs = model.forward_backward(inputs=batch, adapter_name=A, temperature=0.8, **kwargs)
        found.append((outputs["loss"], gradients(model)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert_close(found[1][1], found[0][1], 1e-3)
