"""The forms of cross entropy, compared with torch's."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from tests.support.losses.batches import batch, poisoned
from twinkle.errors import InvalidInputError, MissingDependencyError
from twinkle.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, MSELoss

V = 11


def logits_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    b = batch(seed)
    return b.inputs, 3 * torch.randn(4, 7, V, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference(inputs: dict[str, torch.Tensor], logits: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, V), inputs["labels"].reshape(-1), reduction=reduction)


LOSSES = [
    CrossEntropyLoss,
    lambda **config: ChunkedCrossEntropyLoss(5, **config),
    lambda **config: ChunkedCrossEntropyLoss(1000, **config),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make", LOSSES)
def test_from_logits(make, reduction: str) -> None:
    inputs, logits = logits_of()
    logits.requires_grad_()
    loss = make(reduction=reduction)
    result = loss(inputs, {"logits": logits})
    expected = reference(inputs, logits, reduction)
    torch.testing.assert_close(result["loss"], expected)
    torch.testing.assert_close(torch.autograd.grad(result["loss"], logits)[0], torch.autograd.grad(expected, logits)[0])
    tokens = (inputs["labels"] != -100).sum().item()
    assert int(result["num_tokens"]) == (tokens if reduction == "sum" else 0)
    assert loss.reduction == reduction


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make", LOSSES)
def test_from_logps(make, reduction: str) -> None:
    b = batch(1)
    logps = poisoned(b.logps, b.mask).requires_grad_()
    result = make(reduction=reduction)(b.inputs, {"logps": logps, "logits": torch.zeros(0)})
    expected = -getattr(b.logps[b.mask], reduction)()
    assert result["loss"].item() == pytest.approx(expected.item())
    result["loss"].backward()
    scale = 1 / b.mask.sum() if reduction == "mean" else 1
    torch.testing.assert_close(logps.grad, -b.mask.double() * scale)


@pytest.mark.parametrize("make", LOSSES)
def test_dft_weighs_with_the_probability(make) -> None:
    inputs, logits = logits_of(2)
    logits.requires_grad_()
    loss = make(dft=True)(inputs, {"logits": logits})["loss"]
    mask = inputs["labels"] != -100
    logps = F.log_softmax(logits, -1).gather(-1, inputs["labels"].clamp(min=0)[..., None])[..., 0]
    expected = -(logps.exp().detach() * logps)[mask].mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0])


def test_chunks_check_their_gradient_and_leave_the_logits_alone() -> None:
    inputs, logits = logits_of(3)
    before = logits.clone()
    loss = ChunkedCrossEntropyLoss(4, reduction="sum")
    assert torch.autograd.gradcheck(lambda x: loss(inputs, {"logits": x})["loss"], (logits.requires_grad_(),))
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("make", LOSSES)
def test_padding_that_is_not_finite(make) -> None:
    inputs, logits = logits_of(4)
    expected = make()(inputs, {"logits": logits})["loss"]
    mask = inputs["labels"] != -100
    bad = poisoned(logits, mask[..., None].expand_as(logits)).requires_grad_()
    result = make()(inputs, {"logits": bad})["loss"]
    assert result.item() == expected.item()
    result.backward()
    assert (bad.grad[~mask] == 0).all()
    assert torch.isfinite(bad.grad).all()


@pytest.mark.parametrize("make", LOSSES)
def test_low_precision_logits_are_read_in_float32(make) -> None:
    inputs, logits = logits_of(5, torch.bfloat16)
    logits.requires_grad_()
    loss = make()(inputs, {"logits": logits})["loss"]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference(inputs, logits.float(), "mean"))
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("make", LOSSES)
def test_no_labels(make) -> None:
    logits = torch.randn(2, 3, V, requires_grad=True)
    inputs = {"labels": torch.full((2, 3), -100)}
    for reduction, tokens in (("mean", 0), ("sum", 1)):
        result = make(reduction=reduction)(inputs, {"logits": logits})
        assert result["loss"].item() == 0
        assert int(result["num_tokens"]) == tokens


def test_another_ignore_index() -> None:
    inputs, logits = logits_of(6)
    labels = torch.where(inputs["labels"] == -100, -1, inputs["labels"])
    result = CrossEntropyLoss(ignore_index=-1)({"labels": labels}, {"logits": logits})["loss"]
    torch.testing.assert_close(result, reference(inputs, logits, "mean"))


def test_settings_and_outputs_that_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="reduction: got 'none', allowed: 'mean' or 'sum'"):
        CrossEntropyLoss(reduction="none")
    with pytest.raises(InvalidInputError, match="chunk_size: got 0"):
        ChunkedCrossEntropyLoss(0)
    with pytest.raises(TypeError):
        CrossEntropyLoss(smoothing=0.1)
    with pytest.raises(InvalidInputError, match="must hold 'logits'"):
        CrossEntropyLoss()({"labels": torch.zeros(1, 1)}, {})
    with pytest.raises(InvalidInputError, match=r"got 'shape \(1, 3\)', allowed: that of labels, \(1, 2\)"):
        CrossEntropyLoss()({"labels": torch.zeros(1, 2)}, {"logps": torch.zeros(1, 3)})


# --- Liger ------------------------------------------------------------------------------------------------------------


class FakeKernel:
    """Has the interface of Liger's module and computes the same with torch."""

    def __init__(self, ignore_index: int, reduction: str, label_smoothing: float, softcap: float | None) -> None:
        self.config = (ignore_index, reduction, label_smoothing, softcap)

    def __call__(self, weight, hidden, target, bias=None):
        ignore_index, reduction, smoothing, softcap = self.config
        logits = F.linear(hidden, weight, bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(
            logits, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
        )


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = FakeKernel
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)


def test_liger_is_needed_to_construct_the_fused_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingDependencyError, match="needs the package 'liger-kernel'"):
        LigerFusedLinearCrossEntropyLoss()


@pytest.mark.usefixtures("fake_liger")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_liger_gets_hidden_states_and_the_head(reduction: str) -> None:
    inputs, _ = logits_of(7)
    head = torch.nn.Linear(6, V, dtype=torch.float64)
    hidden = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction)
    result = loss(inputs, {"logits": hidden, "lm_head": head})
    torch.testing.assert_close(result["loss"], reference(inputs, head(hidden), reduction))
    assert int(result["num_tokens"]) == (int((inputs["labels"] != -100).sum()) if reduction == "sum" else 0)


@pytest.mark.usefixtures("fake_liger")
def test_liger_without_a_head() -> None:
    b = batch(8)
    result = LigerFusedLinearCrossEntropyLoss()(b.inputs, b.outputs)
    assert result["loss"].item() == CrossEntropyLoss(reduction="sum")(b.inputs, b.outputs)["loss"].item()
    with pytest.raises(InvalidInputError, match="must hold 'lm_head' with label_smoothing or softcap"):
        LigerFusedLinearCrossEntropyLoss(softcap=30.0)(b.inputs, b.outputs)


# --- mean squared error -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3)])
def test_mse(shape: tuple[int, ...]) -> None:
    predicted = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    labels = torch.randn(5, 3) if shape == (5, 3) else torch.arange(5)
    result = MSELoss()({"labels": labels}, {"logits": predicted})
    squares = [(p - t) ** 2 for p, t in zip(predicted.flatten().tolist(), labels.flatten().tolist(), strict=True)]
    assert result["loss"].item() == pytest.approx(sum(squares) / len(squares))
    assert result["num_tokens"] == 0
    result["loss"].backward()
    assert predicted.grad is not None


def test_mse_does_not_broadcast() -> None:
    with pytest.raises(InvalidInputError, match=r"labels: got 'shape \(5,\)', allowed: that of logits, \(5, 5\)"):
        MSELoss()({"labels": torch.zeros(5)}, {"logits": torch.zeros(5, 5)})
