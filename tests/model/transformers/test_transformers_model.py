"""The library's plain model, compared with transformers, PEFT and torch.optim, in fp32 on a small random Llama."""

import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import twinkle
from tests.support.models.plain_training import LORA, MODEL, assert_close, features, logps, plain_model
from tests.support.models.tiny_models import tiny_model
from twinkle.errors import (
    CheckpointError,
    InvalidInputError,
    NonFiniteError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)
from twinkle.model import TransformersModel


def make(**options) -> TransformersModel:
    return TransformersModel(**{"model_id": MODEL, "mixed_precision": "fp32", "device": "cpu", **options})


def with_lora(name: str = "a-1", **options) -> TransformersModel:
    """Return a model with LoRA in which A and B are both random. At B = 0 the gradient of A would hide mistakes."""
    model = make(**options)
    add_lora(model, name)
    return model


def add_lora(model: TransformersModel, name: str, seed: int = 0) -> None:
    model.add_adapter_to_model(name, peft.LoraConfig(**LORA))
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.get_state_dict(adapter_name=name).values():
        # drawn on the CPU, so that all devices get the same
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)


def plain_lora(model: TransformersModel) -> peft.PeftModel:
    plain = peft.get_peft_model(plain_model(), peft.LoraConfig(**LORA))
    peft.set_peft_model_state_dict(plain, model.get_state_dict())
    return plain


def gradients(module: torch.nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    named = module.named_parameters()
    return {name.replace(f".{adapter}.", "."): p.grad.clone() for name, p in named if p.grad is not None}


def token_sum(module: torch.nn.Module, batch) -> tuple[Tensor, int]:
    labels, lp, _ = logps(module, batch)
    return -torch.where(labels != -100, lp, 0.0).sum(), int((labels != -100).sum())


# --- one pass ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
def test_all_parameters(gradient_checkpointing, padding_free):
    model, plain, batch = make(gradient_checkpointing=gradient_checkpointing), plain_model(), features(9, 14, 6)
    assert model.model.is_gradient_checkpointing is gradient_checkpointing
    model.set_processor("InputProcessor", padding_free=padding_free)
    outputs = model.forward_backward(inputs=batch)
    loss, count = token_sum(plain, batch)
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert outputs["num_tokens"] == count
    assert "logits" not in outputs
    assert not outputs["logps"].requires_grad
    assert_close(gradients(model.model), gradients(plain))


def test_sequences_of_equal_length_share_a_call_of_attention(monkeypatch):
    model, plain, batch = make(), plain_model(), features(9, 6, 14, 6, 9, 6)
    lengths, attend = [], torch.nn.functional.scaled_dot_product_attention

    def attend_and_count(query, *args, **options):
        lengths.append(query.shape[2])
        return attend(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_and_count)
    outputs = model.forward_backward(inputs=batch)
    assert lengths == [6, 9, 14] * plain.config.num_hidden_layers
    monkeypatch.undo()
    _, lp, _ = logps(plain, batch)
    assert torch.allclose(outputs["logps"], lp, atol=1e-5)  # in the order of the batch
    token_sum(plain, batch)[0].backward()
    assert_close(gradients(model.model), gradients(plain))
    embeddings = model.forward_only(inputs=batch, task="embedding")["embeddings"]
    single = [model.forward_only(inputs=[row], task="embedding")["embeddings"][0] for row in batch]
    assert torch.allclose(embeddings, torch.stack(single), atol=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "grpo"])
def test_lora(loss):
    model = with_lora()
    plain, batch = plain_lora(model), features(9, 14, 6, 11)
    base = model.forward_only(inputs=batch, disable_lora=True)["logps"]
    with torch.no_grad(), plain.disable_adapter():
        assert torch.allclose(base, logps(plain, batch)[1], atol=1e-5)
    model.set_loss(loss, beta=0.3)
    labels, lp, _ = logps(plain, batch)
    mask = labels != -100
    if loss == "dpo":
        outputs = model.forward_backward(inputs=batch, ref_logps=base)
        gain = (torch.where(mask, lp - base, 0.0)).sum(1)
        expected = -torch.nn.functional.logsigmoid(0.3 * (gain[0::2] - gain[1::2])).mean()
    else:
        outputs = model.forward_backward(inputs=batch, ref_logps=base, advantages=[1.0, -1.0, 0.5, 2.0])
        terms = -torch.exp(lp - lp.detach()) * torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None]
        terms = terms + 0.3 * (torch.exp(base - lp) - (base - lp) - 1)
        expected = (torch.where(mask, terms, 0.0).sum(1) / mask.sum(1)).mean()
    expected.backward()
    assert outputs["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients(model.model, "a-1"), gradients(plain))


def test_a_head_that_is_trained_gets_its_gradient_in_chunks(monkeypatch):
    monkeypatch.setattr("twinkle.model.transformers.causal_forward.head_chunk_rows", lambda device, vocab: 4)
    model, plain, batch = make(), plain_model(), features(9, 14)
    model.forward_backward(inputs=batch)
    token_sum(plain, batch)[0].backward()
    assert_close(gradients(model.model), gradients(plain))


@pytest.mark.parametrize("family", ["gemma2", "qwen3_5", "qwen3_moe", "phi"])
def test_other_families(family, tmp_path):
    """Families with soft caps, layers that cannot run packed, experts, and biases."""
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path)
    model = make(model_id=str(tmp_path), tokenizer_id=MODEL)
    batch = [
        {"input_ids": [t % 97 for t in row["input_ids"]], "labels": [t % 97 if t >= 0 else t for t in row["labels"]]}
        for row in features(9, 14, 5)
    ]
    outputs = model.forward_backward(inputs=batch)
    loss, _ = token_sum(plain.train(), batch)
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients(model.model), gradients(plain), 2e-5)


def test_a_family_nobody_tested_runs_through_its_own_forward(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    plain = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300, resid_pdrop=0, embd_pdrop=0))
    plain.config.attn_pdrop = 0.0
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain.save_pretrained(tmp_path)
    model = make(model_id=str(tmp_path), tokenizer_id=MODEL)
    for module in model.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = features(9, 5)
    outputs = model.forward_backward(inputs=batch)
    loss, _ = token_sum(plain, batch)
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_logits_temperature_and_entropy_on_request():
    model, plain, batch = make(), plain_model(), features(9, 5)
    model.set_loss("grpo", entropy_coef=0.1)
    outputs = model.forward_only(inputs=batch, return_logits=True, temperature=0.5)
    _, lp, logits = logps(plain, batch, temperature=0.5)
    real = torch.arange(9)[None] < torch.tensor([[9], [5]])
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(outputs["logps"], lp, atol=1e-5)
    assert torch.allclose(outputs["logits"][real], logits[real], atol=1e-5)
    assert torch.allclose(outputs["entropies"][real], entropy[real], atol=1e-5)


def test_embeddings_are_of_the_last_token():
    model, plain = make(), plain_model()
    batch = [{**row, "labels": [label]} for row, label in zip(features(9, 5, 7, 6), (1, 0, 1, 0), strict=True)]
    model.set_loss("infonce")
    outputs = model.forward_backward(inputs=batch, task="embedding")
    for row, embedding in zip(batch, outputs["embeddings"], strict=True):
        hidden = plain.model(torch.tensor([row["input_ids"]])).last_hidden_state[0, -1]
        assert torch.allclose(embedding, hidden / hidden.norm(), atol=1e-5)
    assert outputs["loss"] > 0
    assert gradients(model.model)


def test_a_loss_that_reads_logits_gets_them():
    model = make()
    model.set_loss("gkd")
    batch = features(8, 6)
    teacher = torch.randn(2, 8, 512, generator=torch.Generator().manual_seed(0))
    outputs = model.forward_backward(inputs=batch, teacher_logits=teacher)
    assert outputs["loss"] > 0
    assert gradients(model.model)


def test_bf16_keeps_what_is_trained_in_fp32(monkeypatch):
    monkeypatch.setattr("twinkle.model.transformers.model.bf16_is_slow", lambda device_type: False)
    full, lora = make(mixed_precision="bf16"), with_lora(mixed_precision="bf16")
    assert {p.dtype for p in full.model.parameters()} == {torch.float32}
    kinds = {(p.requires_grad, p.dtype) for p in lora.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    batch, exact = features(12, 7), make()
    for model in (full, lora):
        outputs = model.forward_backward(inputs=batch)
        assert outputs["logps"].dtype == torch.float32
        assert {gradient.dtype for gradient in gradients(model.model).values()} == {torch.float32}
    expected = exact.forward_backward(inputs=batch)["loss"]
    assert full.optimizer_group[""].train_status.outputs["loss"] == pytest.approx(expected, rel=2e-3)


def log_lines(monkeypatch) -> list[str]:
    """Return the list to which lines about a chosen precision will be added."""
    lines: list[str] = []
    monkeypatch.setattr(
        "twinkle.model.library.parallel_options.logger.info", lambda text, *values: lines.append(text % values)
    )
    return lines


def test_without_bf16_instructions_the_default_is_fp32(monkeypatch):
    lines = log_lines(monkeypatch)
    monkeypatch.setattr("twinkle.model.decoder.precision.cpu_instructions", lambda: None)
    exact, batch = with_lora(mixed_precision="fp32"), features(12, 7)
    assert lines == []
    for default in (None, "auto"):
        model = with_lora(mixed_precision=default)
        assert lines == ["mixed_precision: fp32, because this CPU has no bf16 instructions"]
        lines.clear()
        assert {p.dtype for p in model.model.parameters()} == {torch.float32}
        assert model.forward_backward(inputs=batch)["loss"] == exact.forward_backward(inputs=batch)["loss"]


def test_with_bf16_instructions_the_default_is_bf16(monkeypatch):
    lines = log_lines(monkeypatch)
    monkeypatch.setattr("twinkle.model.decoder.precision.cpu_instructions", lambda: "amx_bf16")
    model = TransformersModel(model_id=MODEL, device="cpu")
    add_lora(model, "a-1")
    assert lines == ["mixed_precision: bf16, because this CPU has instructions for it (amx_bf16)"]
    assert {(p.requires_grad, p.dtype) for p in model.model.parameters()} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }


def test_bf16_that_was_asked_for_is_obeyed_with_a_warning(monkeypatch):
    lines = []
    monkeypatch.setattr(twinkle.get_logger(), "warning", lines.append)
    monkeypatch.setattr("twinkle.model.transformers.model.bf16_is_slow", lambda device_type: True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = with_lora(mixed_precision="bf16")
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: … frame #0: …", stacklevel=1)  # torch's C++ trace
    assert not [warning for warning in seen if "mkldnn" in str(warning.message)]
    assert torch.bfloat16 in {p.dtype for p in model.model.parameters()}
    (line,) = lines
    assert "200 times as long as in fp32" in line


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), (torch.optim.Adam, {})])
def test_training_loop_equals_torch(optimizer, options):
    """Windows of two passes, uneven lengths, weight decay only for matrices, and a schedule."""
    model, plain = make(), plain_model()
    model.set_optimizer(optimizer, lr=1e-3, weight_decay=0.1, **options)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=5)
    norms = [p for name, p in plain.named_parameters() if "norm" in name]
    rest = [p for name, p in plain.named_parameters() if "norm" not in name]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    cls = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    theirs = cls(groups, lr=1e-3, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, model.optimizer_group[""].lr_scheduler.lr_lambdas[0])
    total = 0
    for step in range(1, 7):
        batch = features(4 + step, 13 - step, seed=step)
        ours = model.forward_backward(inputs=batch, gradient_accumulation_steps=2)["loss"]
        loss, count = token_sum(plain, batch)
        loss.backward()
        total += count
        assert ours == pytest.approx(loss.item(), rel=1e-5)
        norm = model.clip_grad_and_step(0.5)
        if step % 2:
            assert norm is None
            continue
        for parameter in plain.parameters():
            parameter.grad /= total
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)), rel=1e-4)
        theirs.step()
        theirs.zero_grad()
        schedule.step()
        total = 0
        assert_close(dict(model.model.named_parameters()), dict(plain.named_parameters()), 5e-5)


def test_schedulers_are_checked():
    model = make()
    model.set_optimizer("SGD", lr=0.1)
    with pytest.raises(UnknownNameError, match="CosineWarmupScheduler"):
        model.set_lr_scheduler("CosineWarmup")
    with pytest.raises(UnknownNameError, match="step_size"):
        model.set_lr_scheduler("StepLR", steps=1)
    model.set_lr_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    model.forward_backward(inputs=features(5))
    model.clip_grad_and_step()
    assert model.optimizer_group[""].lr == [0.05, 0.05]


def test_step_normalises_without_clipping():
    clipped, plain_step = make(), make()
    for model in (clipped, plain_step):
        model.set_optimizer("SGD", lr=0.1, weight_decay=0.0)
        model.forward_backward(inputs=features(9, 5))
    clipped.clip_grad_and_step(max_grad_norm=1e9)
    plain_step.step()
    assert_close(dict(plain_step.model.named_parameters()), dict(clipped.model.named_parameters()), 1e-7)


# --- adapters and state -----------------------------------------------------------------------------------------------


def train(model: TransformersModel, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        losses.append(model.forward_backward(inputs=features(5 + step, 12 - step, seed=step))["loss"])
        model.clip_grad_and_step(gradient_accumulation_steps=2)
    return losses


def prepare(model: TransformersModel) -> TransformersModel:
    model.set_optimizer("AdamW", lr=2e-3)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=8)
    return model


@pytest.mark.parametrize("when", [2, 3], ids=["between windows", "inside a window"])
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "full"])
def test_resume_equals_continue(tmp_path, when, lora):
    model = prepare(with_lora() if lora else make())
    train(model, 0, when)
    where = model.save("mid", str(tmp_path), save_optimizer=True, consumed_train_samples=2 * when)
    expected = train(model, when, 7)
    other = with_lora("b-1") if lora else make()  # other weights, which the checkpoint's replace
    if not lora:
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(1.5)
    progress = prepare(other).resume_from_checkpoint(where)
    assert progress == {"cur_step": when, "consumed_train_samples": 2 * when, "gradient_accumulation_steps": 2}
    assert train(other, when, 7) == pytest.approx(expected, rel=1e-6)


def test_resuming_needs_what_was_saved(tmp_path):
    model = make()
    where = prepare(model).save("x", str(tmp_path), save_optimizer=True)
    other = make(model_id=where)
    with pytest.raises(UserError, match="set_optimizer"):
        other.resume_from_checkpoint(where)
    other.set_optimizer("AdamW")
    with pytest.raises(UserError, match="set_lr_scheduler"):
        other.resume_from_checkpoint(where)
    assert other.resume_from_checkpoint(where, resume_only_model=True)["cur_step"] == 0


def test_resuming_without_some_files(tmp_path):
    model = prepare(with_lora())
    train(model, 0, 2)
    where = Path(model.save("x", str(tmp_path), save_optimizer=True, consumed_train_samples=4))
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pt"):
        (where / file).unlink()
    other = prepare(with_lora("b-1"))
    assert other.resume_from_checkpoint(where)["consumed_train_samples"] == 4
    assert_close(other.get_state_dict(), model.get_state_dict(), 0.0)
    assert other.optimizer_group["b-1"].cur_step == 2
    assert not other.optimizer_group["b-1"].optimizer.state


def test_weights_of_another_model_are_refused(tmp_path):
    where = Path(prepare(make()).save("x", str(tmp_path), save_optimizer=True))
    other = prepare(make())
    before = {name: parameter.clone() for name, parameter in other.model.named_parameters()}
    save_file({"model.norm.weight": torch.zeros(3), "extra": torch.zeros(1)}, where / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not fit the model; different: extra"):
        other.resume_from_checkpoint(where)
    assert_close(dict(other.model.named_parameters()), before, 0.0)
    (where / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        other.resume_from_checkpoint(where)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
def test_a_full_model_loads_checkpoints_of_transformers(tmp_path, family):
    """Also in several files, in bf16, and with a head that is the embedding."""
    tiny_model(family, seed=0).save_pretrained(tmp_path / "first")
    tiny_model(family, seed=1).bfloat16().save_pretrained(tmp_path / "other", max_shard_size="10KB")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float32).eval()
    model = make(model_id=str(tmp_path / "first"), tokenizer_id=MODEL)
    model.set_optimizer("AdamW", lr=1e-2)
    batch = [{name: [t % 97 if t >= 0 else t for t in row[name]] for name in row} for row in features(9, 5)]
    model.forward_backward(inputs=batch)
    model.clip_grad_and_step()
    model.load("other", tmp_path)
    assert not model.optimizer_group[""].optimizer.state  # the moments belonged to the weights before
    expected = logps(other, batch)[1].detach()
    for options in ({}, {"disable_lora": True}):  # without adapters there is nothing to disable
        torch.testing.assert_close(model.forward_only(inputs=batch, **options)["logps"], expected, rtol=1e-5, atol=1e-5)
    assert_close(model.get_state_dict(), dict(other.named_parameters()), 0.0)


def test_the_older_name_of_dtype():
    assert {each.dtype for each in make(torch_dtype=torch.bfloat16).model.parameters()} == {torch.bfloat16}


def test_a_frozen_adapter_gets_no_optimizer():
    model = make()
    model.add_adapter_to_model("a-1", peft.LoraConfig(**LORA), is_trainable=False)
    with pytest.raises(UserError, match="is_trainable"):
        model.set_optimizer("AdamW")


def test_adapters_take_turns():
    model = with_lora("a-1")
    add_lora(model, "b-1", seed=3)
    assert model.active_group == "b-1"
    for name in ("a-1", "b-1"):
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict(adapter_name="a-1").items()}
    model.forward_backward(inputs=features(8), adapter_name="a-1")
    model.forward_backward(inputs=features(9), adapter_name="b-1")
    model.clip_grad_and_step(adapter_name="b-1")
    assert_close(model.get_state_dict(adapter_name="a-1"), before, 0.0)
    expected = gradients(model.model, "a-1")
    alone = with_lora("a-1")
    alone.forward_backward(inputs=features(8))
    assert_close(expected, gradients(alone.model, "a-1"), 1e-6)


def test_a_saved_adapter_is_pefts(tmp_path):
    model = with_lora()
    where = model.save("x", str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(plain_model(), where)
    with torch.no_grad():
        _, theirs, _ = logps(loaded, features(8))
    assert torch.allclose(model.forward_only(inputs=features(8))["logps"], theirs, atol=1e-5)
    third = make()
    third.add_adapter_to_model("c-1", where)
    assert_close(third.get_state_dict(), model.get_state_dict(), 0.0)
    with pytest.raises(CheckpointError, match="save_optimizer"):
        model.resume_from_checkpoint(where)
    other = make()
    other.add_adapter_to_model("d-1", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match="does not fit"):
        other.load("x", str(tmp_path))


def test_dropout_belongs_to_training():
    model = make()
    model.add_adapter_to_model("a-1", peft.LoraConfig(**LORA, lora_dropout=0.5, init_lora_weights=False))
    batch = features(10)
    evaluated = [model.forward_only(inputs=batch)["logps"] for _ in range(2)]
    assert torch.equal(*evaluated)
    assert not torch.equal(*(model.forward(inputs=batch)["logps"] for _ in range(2)))
    assert torch.equal(model.forward_only(inputs=batch)["logps"], evaluated[0])


def test_metrics_tell_loss_accuracy_and_rate():
    model = prepare(make())
    outputs = model.forward_backward(inputs=features(9, 5))
    model.clip_grad_and_step()
    metrics = model.calculate_metric(is_training=True)
    assert metrics["loss"] == f"{outputs['loss'] / outputs['num_tokens']:.4f}"
    assert metrics["total_tokens"] == outputs["num_tokens"]
    assert metrics["learning rate"] == f"{0:.6e}"
    model.forward_only(inputs=features(7))
    assert model.calculate_metric(is_training=False) != {}


def test_a_model_can_be_made_from_a_config():
    config = plain_model().config
    model = TransformersModel(config=config, mixed_precision="no", device="cpu")
    assert model.forward_only(inputs=features(5))["logps"].shape == (1, 5)
    with pytest.raises(InvalidInputError, match="tokenizer_id"):
        model.forward(inputs={"messages": [{"role": "user", "content": "hi"}]})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return make()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.set_optimizer("AdamV"), UnknownNameError, "AdamW"),
        (lambda m: m.set_optimizer("SGD", betas=(0, 0)), UnknownNameError, "momentum"),
        (lambda m: m.set_lr_scheduler("StepLR", step_size=1), UserError, "set_optimizer"),
        (lambda m: m.forward(inputs=features(4), task="causal"), UnknownNameError, "causal_lm"),
        (lambda m: m.forward(inputs=features(4), task="fused_lm_ce"), UnsupportedError, "fused_lm_ce"),
        (lambda m: m.forward(inputs=features(4), temperature=-1), InvalidInputError, "temperature"),
        (
            lambda m: m.forward(inputs=[{**features(4)[0], "pixel_values": torch.ones(1)}]),
            InvalidInputError,
            "reads text only",
        ),
        (lambda m: m.backward(), UserError, "forward"),
        (lambda m: m.load("./no-such-folder"), CheckpointError, "no-such-folder"),
        (lambda m: m.add_adapter_to_model("a", 3), InvalidInputError, "LoraConfig"),
        (lambda m: m.set_loss("dpo", bta=1), UnknownNameError, "beta"),
        (lambda m: m.forward(inputs=features(4), adapter_name="a"), UnknownNameError, "adapter"),
        (lambda m: TransformersModel(model_id=MODEL, mixed_precision="fp16"), InvalidInputError, "bf16"),
        (lambda m: TransformersModel(), InvalidInputError, "model_id"),
    ],
)
def test_mistakes_are_named(model, call: Callable, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        call(model)


def test_a_loss_that_is_not_finite_keeps_nothing():
    model = make()
    model.set_loss(lambda inputs, outputs, **_: {"loss": outputs["logps"].sum() * float("nan"), "num_tokens": 0})
    with pytest.raises(NonFiniteError):
        model.forward_backward(inputs=features(5))
    assert gradients(model.model) == {}
    assert model.optimizer_group[""].cur_step == 0


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "full"])
def test_a_loss_that_fails_teaches_nothing_where_that_is_wanted(monkeypatch, lora):
    def failing(inputs, outputs, **_):
        raise KeyError("rewards")

    model = with_lora() if lora else make()
    model.set_loss(failing)
    with pytest.raises(KeyError, match="rewards"):
        model.forward_backward(inputs=features(5))
    monkeypatch.setenv("TWINKLE_FAIL_FAST", "0")
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in model.get_state_dict().items()}
    outputs = model.forward_backward(inputs=features(5, 7))
    assert (outputs["loss"], outputs["num_tokens"]) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in gradients(model.model).values())
    assert len(gradients(model.model)) == len(before)  # the backward pass was complete
    model.clip_grad_and_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.get_state_dict().items())


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "full"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_cuda_equals_cpu(tmp_path, lora, precision, tolerance):
    plain_model().save_pretrained(tmp_path)  # a seed gives different weights on another device
    found = []
    for device, own in (("cpu", "fp32"), ("cuda", precision)):
        options = {"model_id": str(tmp_path), "device": device, "mixed_precision": own}
        model = with_lora(**options) if lora else make(**options)
        loss = model.forward_backward(inputs=features(40, 64, 17))["loss"]
        found.append((loss, {name: gradient.cpu() for name, gradient in gradients(model.model, "a-1").items()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=tolerance)
    assert_close(found[1][1], found[0][1], tolerance)
