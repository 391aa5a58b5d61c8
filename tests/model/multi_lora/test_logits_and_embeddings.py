"""Losses on logits and embeddings, and ``return_logits``, in the multi-LoRA model: equal to PEFT in plain torch."""

from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor

from tests.support.models.plain_training import LORA, MODEL, PlainLora, assert_close, features, logps
from tests.support.models.reference import with_random_weights
from twinkle.errors import CapacityError, InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.loss import GKDLoss, InfonceLoss
from twinkle.model import MultiLoraTransformersModel

A = "a"
VOCABULARY = 512
BATCH = features(9, 14, 6, 11)


@pytest.fixture(scope="module")
def shared() -> MultiLoraTransformersModel:
    return MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")


@pytest.fixture
def model(shared) -> MultiLoraTransformersModel:
    for name in list(shared.optimizer_group):
        shared.remove_adapter(name)
    add(shared, A, 0)
    return shared


@pytest.fixture
def in_batches(model, monkeypatch) -> MultiLoraTransformersModel:
    """The model with so little memory that a request takes several batches."""
    monkeypatch.setattr(model.trainer, "_budget", replace(model.trainer._budget, tokens=24))
    return model


def add(model: MultiLoraTransformersModel, name: str, seed: int) -> None:
    model.add_adapter_to_model(name, peft.LoraConfig(**LORA))
    with_random_weights(model.trainer, name, seed)


def gradients(model: MultiLoraTransformersModel, name: str = A) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in model.trainer.gradients(name).items()}


def plain_of(model: MultiLoraTransformersModel) -> PlainLora:
    return PlainLora(model.get_state_dict(adapter_name=A))


def teacher(seed: int = 0, entries: int = VOCABULARY) -> Tensor:
    return torch.randn(len(BATCH), 14, entries, generator=torch.Generator().manual_seed(seed)) * 2


def unpadded(values: Tensor) -> list[Any]:
    """Return nested lists, one for each sequence and of its length: what a client sends."""
    return [row[: len(each["input_ids"])].tolist() for row, each in zip(values, BATCH, strict=True)]


def gkd_cases() -> dict[str, dict[str, Any]]:
    best = teacher().log_softmax(-1).topk(5, dim=-1)
    wider = torch.cat([best.indices[..., :4], torch.full_like(best.indices[..., :1], VOCABULARY + 7)], -1)
    return {
        "whole vocabulary": {"teacher_logits": teacher()},
        "a smaller vocabulary": {"teacher_logits": teacher(entries=300)},
        "top-k of logits": {"teacher_logits": teacher(), "topk": 7},
        "top-k": {"teacher_topk_logprobs": best.values, "teacher_topk_indices": best.indices},
        "a token the student lacks": {"teacher_topk_logprobs": best.values, "teacher_topk_indices": wider},
        "lists": {
            "teacher_topk_logprobs": unpadded(best.values),
            "teacher_topk_indices": unpadded(best.indices),
        },
        "logits as lists": {"teacher_logits": unpadded(teacher())},
    }


@pytest.mark.parametrize(
    ("case", "beta"), [*((case, 0.5) for case in gkd_cases()), ("whole vocabulary", 0.0), ("top-k", 1.0)]
)
def test_gkd(model, case, beta):
    check_gkd(model, case, beta)


def check_gkd(model: MultiLoraTransformersModel, case: str, beta: float) -> None:
    plain, arguments = plain_of(model), gkd_cases()[case]
    model.set_loss("GKDLoss", beta=beta, temperature=1.7, adapter_name=A)
    outputs = model.forward_backward(inputs=BATCH, adapter_name=A, **arguments)
    labels, lp, logits = logps(plain.model, BATCH)
    loss = GKDLoss(beta=beta, temperature=1.7)({"labels": labels}, {"logits": logits}, **arguments)["loss"]
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(outputs["logps"], lp.detach(), atol=1e-5)
    assert "logits" not in outputs
    assert_close(gradients(model), plain.gradients())


def test_gkd_in_separate_verbs_and_with_accuracy(model):
    """The verbs one by one, and a metric that needs the likeliest token, take the way over all logits."""
    arguments = gkd_cases()["top-k"]
    model.set_loss("gkd", adapter_name=A)
    whole = model.forward_backward(inputs=BATCH, adapter_name=A, **arguments)
    together = gradients(model)
    model.zero_grad(adapter_name=A)
    model.add_metric("Accuracy", adapter_name=A)
    model.forward(inputs=BATCH, adapter_name=A, **arguments)
    assert model.calculate_loss(adapter_name=A) == pytest.approx(whole["loss"], rel=1e-5)
    model.backward(adapter_name=A)
    assert_close(gradients(model), together)


def texts() -> list[dict[str, Any]]:
    return [{**row, "labels": [label]} for row, label in zip(BATCH, (1, 0, 1, 0), strict=True)]


def embeddings(plain: PlainLora) -> Tensor:
    rows = [plain.model.model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0, -1] for row in BATCH]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


@pytest.mark.parametrize("case", ["whole vocabulary", "top-k"])
def test_gkd_in_several_batches(in_batches, case):
    check_gkd(in_batches, case, 0.5)


def test_infonce_in_several_batches(in_batches):
    test_infonce(in_batches)


def test_infonce(model):
    plain = plain_of(model)
    model.set_loss("InfonceLoss", temperature=0.2, adapter_name=A)
    outputs = model.forward_backward(inputs=texts(), adapter_name=A, task="embedding")
    expected = embeddings(plain)
    labels = torch.tensor([1, 0, 1, 0])
    loss = InfonceLoss(temperature=0.2)({"labels": labels}, {"embeddings": expected})["loss"]
    loss.backward()
    assert torch.allclose(outputs["embeddings"], expected.detach(), atol=1e-5)
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients(model), plain.gradients())
    together = gradients(model)
    model.zero_grad(adapter_name=A)
    model.forward(inputs=texts(), adapter_name=A, task="embedding")
    assert model.calculate_loss(adapter_name=A) == pytest.approx(loss.item(), rel=1e-5)
    model.backward(adapter_name=A)
    assert_close(gradients(model), together)


@pytest.mark.parametrize("name", ["chunked_cross_entropy", "mse"])
def test_the_other_losses_on_logits(model, name):
    if name == "mse":  # its labels are numbers that logits of width 1 predict: no causal model has such logits
        model.set_loss(name, adapter_name=A)
        with pytest.raises(InvalidInputError, match=r"labels: got .shape \(4, 14\)., allowed: that of logits"):
            model.forward_backward(inputs=BATCH, adapter_name=A)
        return
    losses = []
    for options in (
        {"loss_cls": name, "chunk_size": 3, "reduction": "sum"},
        {"loss_cls": "cross_entropy", "reduction": "sum"},
    ):
        model.set_loss(adapter_name=A, **options)
        losses.append(model.forward_backward(inputs=BATCH, adapter_name=A)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_return_logits(model):
    plain = plain_of(model)
    labels, lp, logits = logps(plain.model, BATCH, temperature=0.7)
    real = torch.arange(14)[None] < torch.tensor([[len(row["input_ids"])] for row in BATCH])
    for verb in (model.forward_only, model.forward, model.forward_backward):
        outputs = verb(inputs=BATCH, adapter_name=A, return_logits=True, temperature=0.7)
        assert torch.allclose(outputs["logits"][real], logits[real], atol=1e-5)
        assert (outputs["logits"][~real] == 0).all()
        assert torch.allclose(outputs["logps"], lp.detach(), atol=1e-5)
    loss = -torch.where(labels != -100, lp, 0.0).sum()
    loss.backward()
    assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients(model), plain.gradients())
    assert "logits" not in model.optimizer_group[A].train_status.outputs, "nothing reads them any more"


def test_company_does_not_matter(model):
    """Passes with logits, with embeddings and plain ones in one call have the results of each alone."""
    add(model, "b", 1)
    model.set_loss("gkd", adapter_name=A)
    model.set_loss("infonce", adapter_name="b")

    def passes() -> list[Any]:
        return [
            model.prepare_forward_backward(inputs=BATCH[:2], adapter_name=A, teacher_logits=teacher()[:2]),
            model.prepare_forward_backward(inputs=texts(), adapter_name="b", task="embedding"),
        ]

    alone = [model.trainer.forward_backward([each.item])[0] for each in passes()]
    expected = [gradients(model, name) for name in (A, "b")]
    for name in (A, "b"):
        model.zero_grad(adapter_name=name)
    together = model.trainer.forward_backward([each.item for each in passes()])
    for one, other, name, gradient in zip(alone, together, (A, "b"), expected, strict=True):
        assert other.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
        assert_close(gradients(model, name), gradient)


def test_limits_and_mistakes_are_named(model, monkeypatch):
    numbers = 40 * VOCABULARY
    monkeypatch.setattr(model._requests, "_max_logits", numbers - 1)
    with pytest.raises(InvalidInputError, match=rf"{numbers} numbers \(40 tokens × 512 .*max_logits_per_request"):
        model.forward_only(inputs=BATCH, adapter_name=A, return_logits=True)
    monkeypatch.undo()
    monkeypatch.setattr(model.trainer, "_budget", replace(model.trainer._budget, logits=14 * VOCABULARY - 1))
    with pytest.raises(CapacityError, match="a sequence of 14 tokens has 7168; the memory plan has room for 7167"):
        model.forward_only(inputs=BATCH, adapter_name=A, return_logits=True)
    monkeypatch.undo()
    model.set_loss("infonce", adapter_name=A)
    for call, error, text in [
        (lambda: model.forward_backward(inputs=BATCH, adapter_name=A), InvalidInputError, "task: .*InfonceLoss"),
        (lambda: model.forward(inputs=BATCH, adapter_name=A, task="classify"), UnsupportedError, "embedding"),
        (
            lambda: model.forward(inputs=BATCH, adapter_name=A, task="embedding", return_logits=True),
            InvalidInputError,
            "return_logits",
        ),
        (
            lambda: model.forward_backward(inputs=[{"input_ids": [1, 2]}], adapter_name=A, task="embedding"),
            InvalidInputError,
            "labels: got None, allowed: one for each text",
        ),
    ]:
        with pytest.raises(error, match=text):
            call()
    model.set_loss("gkd", adapter_name=A)
    for arguments, text in [
        ({}, "teacher_logits"),
        ({"teacher_logits": teacher()[:2]}, r"teacher_logits: got .shape \(2, 14, 512\)., allowed: \(4, 14 or more"),
        ({"teacher_logits": [[1.0], [[2.0]]]}, "teacher_logits: got .list of 2 rows"),
        ({"teacher_topk_logprobs": unpadded(teacher(entries=3))}, "teacher_topk_indices: got .nothing"),
        (
            {"teacher_topk_logprobs": np.zeros((4, 14, 2)), "teacher_topk_indices": np.full((4, 14, 2), -1)},
            "token ids ≥ 0",
        ),
        ({"teacher_topk_logprobs": np.zeros((4, 14, 2)), "teacher_topk_indices": np.zeros((4, 14, 2))}, "integers"),
    ]:
        with pytest.raises(InvalidInputError, match=text):
            model.forward_backward(inputs=BATCH, adapter_name=A, **arguments)
    model.forward(inputs=BATCH, adapter_name=A)
    entries = {"teacher_topk_logprobs": np.zeros((4, 14, 2))}
    expected = model.calculate_loss(**entries, teacher_topk_indices=np.full((4, 14, 2), VOCABULARY), adapter_name=A)
    huge = np.full((4, 14, 2), 2**62)  # tokens that the student lacks take no memory, however large they are
    assert model.calculate_loss(**entries, teacher_topk_indices=huge, adapter_name=A) == expected
    for indices, text in ((np.full((4, 14, 2), -1), "token ids ≥ 0"), (np.ones((4, 14, 2), bool), "integers")):
        with pytest.raises(InvalidInputError, match=f"teacher_topk_indices: .*{text}"):
            model.calculate_loss(**entries, teacher_topk_indices=indices, adapter_name=A)
    with pytest.raises(UnknownNameError, match=r"known: .*teacher_logits"):
        model.forward_backward(inputs=BATCH, adapter_name=A, teacher=1)
    assert gradients(model) == {}
