"""The value model, compared with a Transformers model that has a linear head, in fp32 on a small random Llama."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.models.plain_training import MODEL, assert_close, features, plain_model
from tests.support.models.tiny_models import tiny_model
from twinkle.errors import CheckpointError, InvalidInputError, UnsupportedError
from twinkle.loss import PPOValueLoss
from twinkle.metric import PPOValueMetric
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TransformersValueModel

BATCH = features(9, 14, 6)
COUNTS = [sum(label != -100 for label in row["labels"]) for row in BATCH]
RETURNS = [[0.1 * (i + t) for t in range(count)] for i, count in enumerate(COUNTS)]
OLD = [[0.05 * t - 0.1 for t in range(count)] for count in COUNTS]


def make(**options) -> TransformersValueModel:
    return TransformersValueModel(**{"model_id": MODEL, "mixed_precision": "fp32", "device": "cpu", **options})


def draw_head(head: nn.Linear) -> None:
    """Give a head random weights: with zeros, nothing below it has a gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.3)


class PlainCritic(nn.Module):
    """The trunk of a Transformers model with a linear layer on its hidden states."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model.base_model
        self.lm_head = nn.Linear(model.config.hidden_size, 1)
        draw_head(self.lm_head)

    def values(self, batch) -> torch.Tensor:
        longest = max(len(row["input_ids"]) for row in batch)
        padded = [[row["input_ids"] + [0] * (longest - len(row["input_ids"]))] for row in batch]
        mask = torch.tensor([[t < len(row["input_ids"]) for t in range(longest)] for row in batch])
        hidden = self.model(input_ids=torch.tensor(padded)[:, 0], attention_mask=mask.long()).last_hidden_state
        return self.lm_head(hidden)[..., 0].masked_fill(~mask, 0.0)

    def loss(self, batch) -> torch.Tensor:
        terms, values = [], self.values(batch)
        for row, value, old, wanted in zip(batch, values, OLD, RETURNS, strict=True):
            v, o, r = (
                value[[i for i, label in enumerate(row["labels"]) if label != -100]],
                *map(torch.tensor, (old, wanted)),
            )
            clipped = o + (v - o).clamp(-0.2, 0.2)
            terms.append(0.5 * torch.maximum((v - r) ** 2, (clipped - r) ** 2))
        return torch.cat(terms).mean()


def gradients(module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def weights(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_the_head_begins_with_zeros() -> None:
    model = make(dtype=torch.bfloat16)
    head = model.model.get_output_embeddings()
    assert (head.in_features, head.out_features, head.weight.dtype) == (64, 1, torch.bfloat16)
    assert not head.weight.any()
    assert not head.bias.any()
    assert model.hf_config.tie_word_embeddings is False
    outputs = model.forward_only(inputs=BATCH)
    assert outputs.keys() == {"values"}
    assert outputs["values"].shape == (3, 14)
    assert not outputs["values"].any()


@pytest.mark.parametrize("way", ["padded", "packed", "in parts", "checkpointed"])
def test_values_gradients_and_steps(way: str) -> None:
    model = make(gradient_checkpointing=way == "checkpointed")
    plain = PlainCritic(plain_model())
    draw_head(model.model.get_output_embeddings())
    model.set_processor("InputProcessor", padding_free=way == "packed")
    model.set_loss("PPOValueLoss", epsilon=0.2)
    model.add_metric(PPOValueMetric, epsilon=0.2)
    model.set_optimizer("AdamW", lr=1e-2, weight_decay=0.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    size = {"micro_batch_size": 2} if way == "in parts" else {}
    torch.testing.assert_close(
        model.forward_only(inputs=BATCH, **size)["values"], plain.values(BATCH), rtol=1e-5, atol=1e-5
    )
    for _ in range(3):
        outputs = model.forward_backward(inputs=BATCH, old_values=OLD, returns=RETURNS, advantages=OLD, **size)
        optimizer.zero_grad()
        loss = plain.loss(BATCH)
        loss.backward()
        assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(outputs["values"], plain.values(BATCH).detach(), rtol=2e-5, atol=2e-5)
        assert_close(gradients(model.model), gradients(plain), 2e-5)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert model.clip_grad_and_step(1.0) == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        assert_close(weights(model.model), weights(plain))
    told = model.calculate_metric(is_training=True)
    assert told["train/return_mean"] == pytest.approx(sum(map(sum, RETURNS)) / sum(COUNTS))
    assert {"train/explained_variance", "train/advantage_std", "loss"} <= told.keys()
    assert "accuracy" not in told


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "qwen3_5"])
def test_other_families(family: str, tmp_path) -> None:
    """Tied embeddings, soft caps of logits (which values do not get), and layers that cannot run packed."""
    tiny_model(family).save_pretrained(tmp_path / "base")
    model = make(model_id=str(tmp_path / "base"), tokenizer_id=MODEL)
    plain = PlainCritic(tiny_model(family))
    draw_head(model.model.get_output_embeddings())
    batch = [{name: [t % 97 if t >= 0 else t for t in row[name]] for name in row} for row in BATCH]
    outputs = model.forward_backward(inputs=batch, old_values=OLD, returns=RETURNS)
    plain.loss(batch).backward()
    torch.testing.assert_close(outputs["values"], plain.values(batch).detach(), rtol=1e-5, atol=1e-5)
    assert_close(gradients(model.model), gradients(plain), 2e-5)
    saved = model.save("critic", tmp_path)
    again = make(model_id=saved)
    torch.testing.assert_close(again.forward_only(inputs=batch)["values"], outputs["values"])


def test_a_family_nobody_tested_runs_through_its_own_forward(tmp_path) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    plain = GPT2LMHeadModel(config)
    plain.save_pretrained(tmp_path / "base")
    model = make(model_id=str(tmp_path / "base"), tokenizer_id=MODEL)
    draw_head(model.model.get_output_embeddings())
    critic = PlainCritic(plain)
    torch.testing.assert_close(model.forward_only(inputs=BATCH)["values"], critic.values(BATCH), rtol=1e-5, atol=1e-5)
    again = make(model_id=model.save("critic", tmp_path), tokenizer_id=MODEL)
    assert torch.equal(again.forward_only(inputs=BATCH)["values"], model.forward_only(inputs=BATCH)["values"])


def trained(model, steps: int = 2) -> TransformersValueModel:
    model.set_optimizer("AdamW", lr=1e-2)
    return train(model, steps)


def train(model, steps: int = 2) -> TransformersValueModel:
    for _ in range(steps):
        model.forward_backward(inputs=BATCH, old_values=OLD, returns=RETURNS)
        model.clip_grad_and_step()
    return model


def values(model) -> torch.Tensor:
    return model.forward_only(inputs=BATCH)["values"]


def test_a_checkpoint_is_reopened_in_three_ways(tmp_path) -> None:
    model = trained(make())
    saved = model.save("critic", tmp_path, save_optimizer=True, consumed_train_samples=6)
    files = {path.name for path in (tmp_path / "critic").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "optimizer.pt", "trainer_state.json"} <= files
    assert load_file(tmp_path / "critic" / "model.safetensors")["lm_head.weight"].shape == (1, 64)
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    expected = values(model)
    assert expected.any()
    constructed = make(model_id=saved)
    assert torch.equal(values(constructed), expected)
    loaded = make()
    loaded.load("critic", tmp_path)
    assert torch.equal(values(loaded), expected)
    resumed = make()
    resumed.set_optimizer("AdamW", lr=1e-2)
    told = resumed.resume_from_checkpoint(saved)
    assert told == {"cur_step": 2, "consumed_train_samples": 6, "gradient_accumulation_steps": 1}
    assert torch.equal(values(resumed), expected)
    assert torch.equal(values(train(resumed)), values(train(model)))  # with the optimizer's moments
    assert make(model_id=constructed.save("twice", tmp_path)).hf_config.architectures == ["LlamaForCausalLM"]


def test_a_checkpoint_in_several_files(tmp_path) -> None:
    model = trained(make())
    model.model.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert torch.equal(values(make(model_id=str(tmp_path / "parts"), tokenizer_id=MODEL)), values(model))
    other = make()
    other.load(str(tmp_path / "parts"))
    assert torch.equal(values(other), values(model))


def test_a_value_checkpoint_is_no_language_model(tmp_path) -> None:
    saved = trained(make()).save("critic", tmp_path)
    with pytest.raises(CheckpointError, match=r"do not fit the model.*lm_head"):
        TransformersModel(model_id=MODEL, device="cpu").load(saved)
    policy = TransformersModel(model_id=MODEL, device="cpu").save("policy", tmp_path)
    with pytest.raises(CheckpointError, match=r"do not fit the model.*lm_head"):
        make().load(policy)
    shutil.rmtree(policy)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.add_adapter_to_model("a", {}), NotImplementedError, "no adapters"),
        (lambda m: m.forward_only(inputs=BATCH, task="embedding"), ValueError, "task: got '?embedding"),
        (lambda m: m.forward(inputs=BATCH, temperature=0.5), InvalidInputError, "temperature: got 0.5"),
        (lambda m: m.forward(inputs=BATCH, return_logits=True), InvalidInputError, "return_logits: got True"),
        (lambda m: m.set_loss("GRPOLoss"), InvalidInputError, "loss_cls: got .*PPOValueLoss"),
        (lambda m: m.forward_backward(inputs=BATCH, returns=RETURNS), InvalidInputError, "old_values: got None"),
    ],
)
def test_mistakes_are_named(call, error, text: str) -> None:
    with pytest.raises(error, match=text):
        call(make())


def test_language_models_have_no_values() -> None:
    for kind in (TransformersModel, MultiLoraTransformersModel):
        model = kind(model_id=MODEL, device="cpu", mixed_precision="fp32")
        names = {}
        if kind is MultiLoraTransformersModel:
            model.add_adapter_to_model("a", {"r": 4})
            names = {"adapter_name": "a"}
        with pytest.raises(UnsupportedError, match="PPOValueLoss: it needs the values of a TransformersValueModel"):
            model.set_loss(PPOValueLoss(), **names)


def test_a_function_may_be_the_loss() -> None:
    model = make()
    draw_head(model.model.get_output_embeddings())
    model.set_loss(lambda inputs, outputs: {"loss": outputs["values"].square().sum(), "num_tokens": 0})
    model.forward_backward(inputs=BATCH)
    assert model.clip_grad_norm() > 0


def test_a_model_without_a_linear_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model_cls: got .*LlamaModel.*linear layer"):
        make(model_cls="LlamaModel")
