"""``micro_batch_size``: the outputs, loss and gradient of one whole batch, for every kind of loss."""

import peft
import pytest
import torch

from tests.support.models.plain_training import LORA, MODEL, assert_close, features
from twinkle.errors import InvalidInputError, UserError
from twinkle.model import MultiLoraTransformersModel, TransformersModel

BATCH = features(9, 5, 7, 4, 6, 3)
PER_ROW = {"advantages": [1.0, -2.0, 0.5, 3.0, -1.0, 0.1]}


def make(**config):
    model = TransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("policy", peft.LoraConfig(**{**LORA, **config}), seed=3)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    model.set_optimizer("AdamW", lr=1e-2)
    return model


@pytest.fixture(scope="module")
def model():
    return make()


def gradients(model):
    found = {name: each.grad.clone() for name, each in model.model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def sequence_entropy(inputs, outputs, **_):
    """A loss of the user's that is neither a sum nor a mean over sequences."""
    sums = outputs["logps"].sum(-1)
    return {"loss": (sums.softmax(0) * sums).sum(), "num_tokens": 0}


LOSSES = {
    "sum over tokens": (("CrossEntropyLoss", {"reduction": "sum"}), {}),
    "mean over tokens": (("CrossEntropyLoss", {}), {}),
    "mean over sequences": (("GRPOLoss", {"entropy_coef": 0.1}), PER_ROW),
    "mean over all tokens": (("BNPOLoss", {}), PER_ROW),
    "PPO": (("PPOLoss", {"entropy_coef": 0.1}), PER_ROW | {"old_logps": [[-5.5] * n for n in (6, 2, 4, 1, 3, 0)]}),
    "PPO by sequences": (("PPOLoss", {"loss_agg_mode": "seq-mean-token-mean"}), PER_ROW),
    "pairs": (
        ("DPOLoss", {"beta": 0.3, "sft_weight": 0.5}),
        {"ref_chosen_logps": [0.0] * 3} | {"ref_rejected_logps": [-1.0] * 3},
    ),
    "the user's": ((sequence_entropy, {}), {}),
    "logits": (("GKDLoss", {}), {"teacher_logits": torch.randn(6, 9, 256, generator=torch.Generator().manual_seed(1))}),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_to_the_whole_batch(model, loss):
    (name, options), arguments = LOSSES[loss]
    model.set_loss(name, **options)
    if "teacher_logits" in arguments:
        width = model.hf_config.vocab_size
        arguments = {"teacher_logits": arguments["teacher_logits"][..., :width]}
    whole = model.forward_backward(inputs=BATCH, **arguments)
    expected = gradients(model)
    size = 1 if loss == "pairs" else 4  # a pair may be divided, and the last part may be smaller
    parts = model.forward_backward(inputs=BATCH, micro_batch_size=size, **arguments)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert parts["num_tokens"] == whole["num_tokens"]
    torch.testing.assert_close(parts["logps"], whole["logps"], rtol=1e-5, atol=1e-5)
    assert not parts["logps"].requires_grad
    assert_close(gradients(model), expected, tolerance=2e-5)


def test_contrasts_within_the_batch(model):
    model.set_loss("InfonceLoss")
    rows = [{"input_ids": row["input_ids"], "labels": [int(index % 3 == 0)]} for index, row in enumerate(BATCH)]
    whole = model.forward_backward(inputs=rows, task="embedding")
    expected = gradients(model)
    parts = model.forward_backward(inputs=rows, task="embedding", micro_batch_size=2)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert_close(gradients(model), expected, tolerance=2e-5)


def test_forward_only_and_the_verbs_one_by_one(model):
    model.set_loss("CrossEntropyLoss")
    whole = model.forward_only(inputs=BATCH, return_logits=True)
    parts = model.forward_only(inputs=BATCH, return_logits=True, micro_batch_size=4)
    for name in ("logps", "logits"):
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-5)
    loss = model.calculate_loss()
    model.forward(inputs=BATCH, micro_batch_size=2)
    assert model.calculate_loss() == pytest.approx(loss, rel=1e-5)
    model.backward()
    apart = gradients(model)
    model.forward_backward(inputs=BATCH)
    assert_close(apart, gradients(model), tolerance=2e-5)


def test_windows_count_all_tokens(model):
    model.set_loss("CrossEntropyLoss", reduction="sum")
    norms = []
    for size in (None, 1):
        for batch in (BATCH[:2], BATCH[2:]):
            model.forward_backward(inputs=batch, micro_batch_size=size, gradient_accumulation_steps=2)
        norms.append(model.clip_grad_norm())
        model.zero_grad()
    model.zero_grad(gradient_accumulation_steps=1)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_dropout_is_the_same_in_both_passes():
    model = make(lora_dropout=0.5)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs = model.forward_backward(inputs=BATCH, micro_batch_size=2)
        found.append(gradients(model))
    assert_close(found[0], found[1], tolerance=0.0)
    torch.manual_seed(5)  # the same parts by hand: their losses are sums, so their gradients add up
    for start in range(0, 6, 2):
        model.forward_backward(inputs=BATCH[start : start + 2], gradient_accumulation_steps=3)
    assert_close(gradients(model), found[0], tolerance=2e-5)
    assert outputs["num_tokens"] == sum(label != -100 for row in BATCH for label in row["labels"])


def test_mistakes(model):
    for size in (0, -1, 1.5, True):
        with pytest.raises(InvalidInputError, match=r"micro_batch_size: got .*, allowed: an integer"):
            model.forward_backward(inputs=BATCH, micro_batch_size=size)
    frozen = TransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")
    frozen.add_adapter_to_model("policy", peft.LoraConfig(**LORA), is_trainable=False)
    with pytest.raises(UserError, match="'policy' is frozen"):
        frozen.forward_backward(inputs=BATCH, micro_batch_size=2)


def test_multi_lora_divides_batches_by_itself():
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("policy", peft.LoraConfig(**LORA))
    losses = [
        model.forward_backward(inputs=BATCH, adapter_name="policy", **size)["loss"]
        for size in ({}, {"micro_batch_size": 2})
    ]
    assert losses[0] == losses[1]
    assert model.forward_only(inputs=BATCH, adapter_name="policy", micro_batch_size=2)["logps"].shape == (6, 9)
    with pytest.raises(InvalidInputError, match="micro_batch_size: got 0"):
        model.forward_only(inputs=BATCH, adapter_name="policy", micro_batch_size=0)
