"""InfoNCE, compared with loops over anchors, and two processes compared with one."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F

from twinkle.errors import InvalidInputError
from twinkle.loss import InfonceLoss

# Three groups: an anchor, its positive, and 2, 0 and 1 negatives.
LABELS = torch.tensor([1, 0, 0, 0, 1, 0, 1, 0, 0])
GROUPS = [(0, [1, 2, 3]), (4, [5]), (6, [7, 8])]


def embeddings(seed: int = 0, texts: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(texts, 4, generator=generator, dtype=torch.float64), dim=-1)


def by_loop(e: torch.Tensor, groups=GROUPS, batch=True, qq=False, dd=False, margin=math.inf, temperature=0.1) -> float:
    losses = []
    documents = [row for _, rows in groups for row in rows]
    for anchor, rows in groups:
        positive = rows[0]
        at_positive = float(e[anchor] @ e[positive])
        others = [float(e[anchor] @ e[row]) for row in (documents if batch else rows) if row != positive]
        others += [float(e[anchor] @ e[other]) for other, _ in groups if other != anchor] if qq else []
        others += [float(e[positive] @ e[row]) for row in documents if row != positive] if dd else []
        kept = [x for x in others if x <= at_positive + margin]
        total = sum(math.exp(x / temperature) for x in [at_positive, *kept])
        losses.append(math.log(total) - at_positive / temperature)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("config", "formula"),
    [
        ({}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"use_batch": False}, {"batch": False}),
        ({"include_qq": True}, {"qq": True}),
        ({"include_dd": True}, {"dd": True}),
        ({"mask_fake_negative": True, "fake_neg_margin": 0.05}, {"margin": 0.05}),
        ({"mask_fake_negative": True, "use_batch": False}, {"margin": 0.1, "batch": False}),
        (
            {"include_qq": True, "include_dd": True, "mask_fake_negative": True},
            {"qq": True, "dd": True, "margin": 0.1},
        ),
        ({"hard_negatives": 1}, {"groups": [(0, [1, 2]), (4, [5]), (6, [7, 8])]}),
        ({"hard_negatives": 0}, {"groups": [(0, [1]), (4, [5]), (6, [7])]}),
    ],
)
def test_formula(config: dict[str, object], formula: dict[str, object]) -> None:
    for seed in range(4):
        e = embeddings(seed)
        result = InfonceLoss(**config)({"labels": LABELS}, {"embeddings": e})
        assert result["loss"].item() == pytest.approx(by_loop(e, **formula), rel=1e-9)
        assert result["num_tokens"] == 0


def test_fake_negatives_occur_in_the_examples() -> None:
    assert any(by_loop(embeddings(seed)) != by_loop(embeddings(seed), margin=0.1) for seed in range(4))


def test_gradient() -> None:
    loss = InfonceLoss(temperature=0.5, include_qq=True, include_dd=True)
    e = embeddings(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss({"labels": LABELS}, {"embeddings": x})["loss"], (e,))


def test_forms_of_embeddings_and_labels() -> None:
    e = embeddings(2)
    expected = InfonceLoss()({"labels": LABELS}, {"embeddings": e})["loss"].item()
    tokens = torch.stack([e, torch.randn_like(e)], dim=1)
    assert InfonceLoss()({"labels": LABELS[:, None]}, {"embeddings": e})["loss"].item() == expected
    assert InfonceLoss()({"labels": LABELS}, {"logits": e})["loss"].item() == expected
    assert InfonceLoss()({"labels": LABELS}, {"logits": tokens})["loss"].item() == expected


def test_no_anchors() -> None:
    e = embeddings(3).requires_grad_()
    result = InfonceLoss()({"labels": torch.zeros(9)}, {"embeddings": e})["loss"]
    result.backward()
    assert result.item() == 0
    assert (e.grad == 0).all()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 0], "allowed: 1 at each anchor, the first text among them"),
        ([1, 1, 0], "a positive, that is a 0, after the anchor at 0"),
        ([1, 0, 1], "a positive, that is a 0, after the anchor at 2"),
        ([1, 0], "got '2 texts', allowed: one for each of 3 embeddings"),
    ],
)
def test_groups_that_are_refused(labels: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        InfonceLoss()({"labels": torch.tensor(labels)}, {"embeddings": embeddings(0, texts=3)})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"fake_neg_margin": -0.1}, "fake_neg_margin"),
        ({"hard_negatives": -1}, "hard_negatives"),
        ({"use_batch": False, "include_qq": True}, "include_qq"),
        ({"use_batch": False, "include_dd": True}, "include_dd"),
    ],
)
def test_settings_that_are_refused(config: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: got "):
        InfonceLoss(**config)


def run_process(rank: int, folder: str) -> None:
    """Compute the loss of this process: groups 0 and 1 belong to rank 0, group 2 to rank 1."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    part = slice(0, 6) if rank == 0 else slice(6, 9)
    e = embeddings(5)[part].clone().requires_grad_()
    loss = InfonceLoss(include_qq=True, include_dd=True, process_group=torch.distributed.group.WORLD)
    result = loss({"labels": LABELS[part]}, {"embeddings": e})["loss"]
    result.backward()
    torch.save((result.detach(), e.grad), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one_batch(tmp_path: Path) -> None:
    """Models average gradients over processes: half the sum over both must be the gradient of the whole batch."""
    torch.multiprocessing.spawn(run_process, args=(str(tmp_path),), nprocs=2)
    whole = embeddings(5).requires_grad_()
    expected = InfonceLoss(include_qq=True, include_dd=True)({"labels": LABELS}, {"embeddings": whole})["loss"]
    expected.backward()
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for value, _ in parts:
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]) / 2, whole.grad)
