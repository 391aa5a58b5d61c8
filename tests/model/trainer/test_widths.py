"""Several targets per token: no request is padded to a neighbour's width, and sparse targets are expanded last."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle.errors import InvalidInputError
from twinkle.model import Datum, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult
from twinkle.model.csr import Csr
from twinkle.model.decoder.head import ChunkedHead, HeadSpec
from twinkle.model.trainer.packing import Budget, SequenceRef, plan
from twinkle.model.types import ObjectiveValue, TokenValues

MakeTrainer = Callable[..., Trainer]
VOCAB = 97
RNG = np.random.default_rng(0)


def wide(length: int, width: int) -> Datum:
    tokens, targets = RNG.integers(0, VOCAB, length), RNG.integers(0, VOCAB, (length, width))
    return Datum(tokens, targets, RNG.random((length, width)).astype(np.float32))


def plain(length: int) -> Datum:
    return Datum(RNG.integers(0, VOCAB, length), RNG.integers(0, VOCAB, length))


def sparse(dense_TK: np.ndarray) -> Csr:
    row, col = dense_TK.nonzero()
    crow = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(dense_TK)))])
    return Csr(dense_TK.shape, crow, col, dense_TK[row, col])


def trained(trainer: Trainer, items: Sequence[TrainItem]) -> list[TrainResult]:
    results = trainer.forward_backward(items)
    assert all(isinstance(result, TrainResult) for result in results), results
    return results  # type: ignore[return-value]


def weights_after(trainer: Trainer, adapter_id: str) -> np.ndarray:
    return np.concatenate([gradient.ravel() for gradient in trainer.gradients(adapter_id).values()])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collects the shapes of the targets that the head gets in training."""
    shapes: list[tuple[int, ...]] = []
    original = ChunkedHead.logprobs_and_gradient

    def noting(head: ChunkedHead, hidden_TH: Tensor, targets_TK: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(targets_TK.shape))
        return original(head, hidden_TH, targets_TK, *rest)

    monkeypatch.setattr(ChunkedHead, "logprobs_and_gradient", noting)
    return shapes


def test_a_neighbour_of_another_width_costs_nothing(make_trainer: MakeTrainer, seen: list[tuple[int, ...]]) -> None:
    trainer = make_trainer()
    for name in ("wide", "plain", "alone"):
        trainer.create_adapter(name, LoraSpec(rank=4, seed=3))
    mixed, honest = [wide(1, 60), plain(9), wide(2, 60)], [plain(30)]
    seen.clear()  # discards those of the new trainer's trial run
    together = trained(trainer, [TrainItem("wide", mixed), TrainItem("plain", honest)])
    assert sorted(seen) == [(3, 60), (39, 1)]
    assert sum(rows * width for rows, width in seen) == 3 * 60 + 9 + 30, "no cell is there for padding"
    (alone,) = trained(trainer, [TrainItem("alone", honest)])
    np.testing.assert_allclose(together[1].logprobs[0], alone.logprobs[0], rtol=1e-5)
    np.testing.assert_allclose(weights_after(trainer, "plain"), weights_after(trainer, "alone"), rtol=1e-3, atol=1e-6)
    assert [lp.shape for lp in together[0].logprobs] == [(1, 60), (9,), (2, 60)]


def test_a_request_of_several_widths_is_the_sum_of_its_datums(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    for name in ("whole", "parts"):
        trainer.create_adapter(name, LoraSpec(rank=4, seed=3, train_unembed=True))
    data = [wide(4, 5), plain(6), wide(3, 2), plain(2), wide(5, 5)]
    (whole,) = trained(trainer, [TrainItem("whole", data)])
    parts = [trained(trainer, [TrainItem("parts", [datum])])[0] for datum in data]
    total = sum(part.metrics["loss:sum"] for part in parts)
    assert whole.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for ours, theirs in zip(whole.logprobs, parts, strict=True):
        np.testing.assert_allclose(ours, theirs.logprobs[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights_after(trainer, "whole"), weights_after(trainer, "parts"), rtol=1e-2, atol=1e-5)


def test_an_objective_sees_all_widths_of_its_request(make_trainer: MakeTrainer) -> None:
    """Also if not all of its sequences fit in one micro-batch."""
    data = [wide(4, 5), plain(6), wide(3, 2), plain(2)]
    calls: list[list[tuple[int, ...]]] = []

    def mean(values: Sequence[TokenValues]) -> ObjectiveValue:
        calls.append([value.logprobs.shape for value in values])
        slopes = [np.full_like(value.logprobs, -1.0) for value in values]
        return ObjectiveValue(float(-sum(value.logprobs.sum() for value in values)), slopes)

    gradients = []
    for tokens in (4096, 6):
        trainer = make_trainer(max_tokens_per_batch=tokens)
        for name in ("objective", "named"):
            trainer.create_adapter(name, LoraSpec(rank=4, seed=3))
        (ours,) = trained(trainer, [TrainItem("objective", data, objective=mean)])
        ones = [Datum(datum.tokens, datum.targets) for datum in data]
        (named,) = trained(trainer, [TrainItem("named", ones)])
        assert ours.metrics["loss:sum"] == pytest.approx(named.metrics["loss:sum"], rel=1e-5)
        gradients += [weights_after(trainer, "objective"), weights_after(trainer, "named")]
    assert calls == [[(4, 5), (6,), (3, 2), (2,)]] * 2
    for other in gradients[1:]:
        np.testing.assert_allclose(gradients[0], other, rtol=1e-2, atol=1e-5)


def test_sparse_is_dense_with_zeros(make_trainer: MakeTrainer) -> None:
    targets, weights = np.zeros((6, 40), np.int64), np.zeros((6, 40), np.float32)
    for row in range(6):
        columns = np.sort(RNG.choice(40, 3, replace=False))
        targets[row, columns] = RNG.integers(1, VOCAB, 3)
        weights[row, columns] = RNG.random(3) + 0.1
    tokens = RNG.integers(0, VOCAB, 6)
    data = {
        "dense": [Datum(tokens, targets, weights)],
        "sparse": [Datum(tokens, sparse(targets), sparse(weights))],
    }
    assert np.array_equal(sparse(targets).dense(), targets)
    trainer = make_trainer()
    results = {}
    for name, sent in data.items():
        trainer.create_adapter(name, LoraSpec(rank=4, seed=3))
        (results[name],) = trained(trainer, [TrainItem(name, sent)])
    assert np.array_equal(results["sparse"].logprobs[0], results["dense"].logprobs[0])
    assert results["sparse"].metrics == results["dense"].metrics
    assert np.array_equal(weights_after(trainer, "sparse"), weights_after(trainer, "dense"))


@pytest.mark.parametrize("as_sparse", [False, True])
def test_no_more_targets_a_token_than_tokens_exist(make_trainer: MakeTrainer, as_sparse: bool) -> None:
    """The shape alone decides: a matrix of 2**40 cells would not fit in memory."""
    trainer = make_trainer()
    trainer.create_adapter("a", LoraSpec(rank=4))
    targets: Any = np.zeros((2, 4096), np.int64)
    if as_sparse:
        empty = np.empty(0, np.int64)
        targets = Csr((2, 2**39), np.zeros(3, np.int64), empty, empty)
    (result,) = trainer.forward([TrainItem("a", [Datum(np.zeros(2, np.int64), targets)])])
    assert isinstance(result, TrainFailure)
    assert isinstance(result.error, InvalidInputError)
    assert f"targets: got '{targets.shape[1]} per token'" in str(result.error)


def test_a_sparse_token_id_out_of_range_is_found(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.create_adapter("a", LoraSpec(rank=4))
    targets = Csr((1, 10), np.array([0, 1]), np.array([3]), np.array([10**6]))
    (result,) = trainer.forward([TrainItem("a", [Datum(np.zeros(1, np.int64), targets)])])
    assert isinstance(result, TrainFailure)
    assert "1000000" in str(result.error)


# --- the head ---------------------------------------------------------------------------------------------------------


class CountingCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_the_way_back_of_many_targets_is_one_operation() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_TH, weight_VH = torch.randn(1, 32, generator=generator), torch.randn(2048, 32, generator=generator)
    targets_TK = torch.randint(0, 64, (1, 1024), generator=generator)  # nearly all tokens occur several times
    slopes_TK = torch.randn(1, 1024, generator=generator)
    head = ChunkedHead(HeadSpec(weight_VH), 16)
    calls = {}
    for width in (1, 1024):
        with CountingCalls() as counting:
            head.logprobs_and_gradient(hidden_TH, targets_TK[:, :width], lambda *_, w=width: slopes_TK[:, :w])
        calls[width] = counting.calls
    assert calls[1024] == calls[1]

    _, gradient_TH = head.logprobs_and_gradient(hidden_TH, targets_TK, lambda *_: slopes_TK)
    leaf = hidden_TH.clone().requires_grad_()
    (leaf @ weight_VH.T).log_softmax(-1).gather(1, targets_TK).mul(slopes_TK).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(gradient_TH, leaf.grad, rtol=1e-4, atol=1e-4)
    looped_TV = -(hidden_TH @ weight_VH.T).softmax(-1) * slopes_TK.sum()
    for k in range(1024):
        looped_TV.scatter_add_(1, targets_TK[:, k : k + 1], slopes_TK[:, k : k + 1])
    torch.testing.assert_close(gradient_TH, looped_TV @ weight_VH, rtol=1e-4, atol=1e-4)


# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_micro_batches_are_bounded_in_targets_too() -> None:
    refs = [SequenceRef(0, number, 10, 1000) for number in range(6)]
    batches = plan(refs, Budget(1000, 1000, cells=25_000))
    assert [len(batch.sequences) for batch in batches] == [2, 2, 2]
    long = [SequenceRef(0, 0, 100, 1000), SequenceRef(0, 1, 1, 1)]
    assert [len(batch.sequences) for batch in plan(long, Budget(1000, 1000, cells=25_000))] == [1, 1]
    narrow = [SequenceRef(0, number, 10) for number in range(50)]
    assert len(plan(narrow, Budget(500, 500, cells=1))) == 1, "with one target a token, tokens alone decide"
