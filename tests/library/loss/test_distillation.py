"""Generalised knowledge distillation, compared with sums over the vocabulary."""

import math

import pytest
import torch

from tests.support.losses.batches import batch, poisoned
from twinkle.errors import InvalidInputError
from twinkle.loss import GKDLoss

V = 6


def example(seed: int = 0, vocabulary: int = V, teacher_vocabulary: int = V):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(4, 7, vocabulary, generator=generator, dtype=torch.float64)
    teacher = 2 * torch.randn(4, 7, teacher_vocabulary, generator=generator, dtype=torch.float64)
    return batch(seed).inputs, student, teacher


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def divergence(student: list[float], teacher: list[float], beta: float) -> float:
    s, t = softmax(student), softmax(teacher)
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = [beta * a + (1 - beta) * b for a, b in zip(t, s, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def by_loop(inputs, student, teacher, beta: float, temperature: float, topk: int | None = None) -> float:
    values = []
    for row, column in (inputs["labels"] != -100).nonzero().tolist():
        s, t = (x[row, column] / temperature for x in (student, teacher))
        if topk is not None:
            entries = t.topk(topk).indices
            s, t = s[entries], t[entries]
        values.append(divergence(s.tolist(), t.tolist(), beta))
    return sum(values) / len(values)


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_formula(beta: float, temperature: float, topk: int | None) -> None:
    inputs, student, teacher = example(1)
    loss = GKDLoss(beta=beta, temperature=temperature)
    result = loss(inputs, {"logits": student}, teacher_logits=teacher, topk=topk)
    assert result["loss"].item() == pytest.approx(by_loop(inputs, student, teacher, beta, temperature, topk))
    assert result["num_tokens"] == 0
    assert loss(inputs, {"logits": teacher}, teacher_logits=teacher, topk=topk)["loss"].item() == pytest.approx(0)


@pytest.mark.parametrize("as_lists", [False, True])
def test_topk_of_a_service(as_lists: bool) -> None:
    """A service returns log-probabilities of K entries; they are renormalised to a distribution over these K."""
    inputs, student, teacher = example(2)
    best = torch.log_softmax(teacher, -1).topk(4)
    values, indices = (best.values.tolist(), best.indices.tolist()) if as_lists else (best.values, best.indices)
    result = GKDLoss()(inputs, {"logits": student}, teacher_topk_logprobs=values, teacher_topk_indices=indices)
    expected = GKDLoss()(inputs, {"logits": student}, teacher_logits=teacher, topk=4)
    assert result["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-6)


def test_topk_entries_that_are_missing() -> None:
    """A service with fewer than K entries sends −∞ for the rest."""
    inputs, student, teacher = example(3)
    best = torch.log_softmax(teacher, -1).topk(4)
    values = best.values.clone()
    values[..., 3] = -math.inf
    student.requires_grad_()
    for beta in (0.0, 0.5, 1.0):
        loss = GKDLoss(beta=beta)(
            inputs, {"logits": student}, teacher_topk_logprobs=values, teacher_topk_indices=best.indices
        )["loss"]
        assert torch.isfinite(torch.autograd.grad(loss, student)[0]).all()


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_chunks_and_gradient(beta: float, chunk_size: int) -> None:
    inputs, student, teacher = example(4)
    inputs, student, teacher = {"labels": inputs["labels"][:2, :4]}, student[:2, :4].clone(), teacher[:2, :4]
    expected = by_loop(inputs, student, teacher, beta, 1.0)
    loss = GKDLoss(beta=beta, chunk_size=chunk_size)

    def value(logits: torch.Tensor) -> torch.Tensor:
        return loss(inputs, {"logits": logits}, teacher_logits=teacher)["loss"]

    assert value(student).item() == pytest.approx(expected)
    assert torch.autograd.gradcheck(value, (student.requires_grad_(),), fast_mode=True)


def test_padding_is_not_read() -> None:
    inputs, student, teacher = example(5)
    mask = (inputs["labels"] != -100)[..., None].expand_as(student)
    expected = GKDLoss()(inputs, {"logits": student}, teacher_logits=teacher)["loss"]
    bad = poisoned(student, mask).requires_grad_()
    longer = torch.cat([poisoned(teacher, mask), torch.full((4, 2, V), math.nan)], dim=1)
    result = GKDLoss()(inputs, {"logits": bad}, teacher_logits=longer)["loss"]
    result.backward()
    assert result.item() == expected.item()
    assert torch.isfinite(bad.grad).all()
    assert (bad.grad[~mask] == 0).all()


@pytest.mark.parametrize(("vocabulary", "teacher_vocabulary"), [(5, 8), (8, 5)])
def test_vocabularies_of_different_sizes(vocabulary: int, teacher_vocabulary: int) -> None:
    """Entries that a model lacks have probability 0 in it."""
    inputs, student, teacher = example(6, vocabulary, teacher_vocabulary)
    result = GKDLoss(beta=0.3)(inputs, {"logits": student}, teacher_logits=teacher)["loss"]
    values = []
    for at in (inputs["labels"] != -100).nonzero().tolist():
        s, t = (softmax(x[at[0], at[1]].tolist()) for x in (student, teacher))
        s, t = ([*x, *[0.0] * (8 - len(x))] for x in (s, t))
        m = [0.3 * a + 0.7 * b for a, b in zip(t, s, strict=True)]
        values.append(0.3 * kl(t, m) + 0.7 * kl(s, m))
    assert result.item() == pytest.approx(sum(values) / len(values))


def test_no_labels() -> None:
    inputs, student, teacher = example(7)
    student.requires_grad_()
    nothing = {"labels": torch.full_like(inputs["labels"], -100)}
    result = GKDLoss()(nothing, {"logits": student}, teacher_logits=teacher)["loss"]
    result.backward()
    assert result.item() == 0
    assert (student.grad == 0).all()


def test_what_is_refused() -> None:
    inputs, student, teacher = example(8)
    outputs = {"logits": student}
    for config, message in (
        ({"beta": 1.1}, "beta: got 1.1, allowed: from 0 to 1"),
        ({"temperature": 0.0}, "temperature: got 0.0"),
        ({"chunk_size": 0}, "chunk_size: got 0"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            GKDLoss(**config)
    for arguments, message in (
        ({}, "teacher_logits: got None"),
        ({"teacher_topk_logprobs": teacher}, "teacher_topk_indices: got 'nothing'"),
        ({"teacher_logits": teacher, "topk": 7}, "topk: got 7, allowed: from 1 to the teacher's vocabulary, 6"),
        (
            {"teacher_logits": teacher[:, :5]},
            r"teacher_logits: got 'shape \(4, 5, 6\)', allowed: \(4, 7 or more, entries\)",
        ),
    ):
        with pytest.raises(InvalidInputError, match=message):
            GKDLoss()(inputs, outputs, **arguments)
