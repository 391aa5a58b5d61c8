"""DPO and related losses, compared with loops over pairs."""

import math
import warnings

import pytest
import torch

from tests.support.losses.batches import Batch, batch, poisoned
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.loss import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss

LOSSES = [CPOLoss, DPOLoss, ORPOLoss, SimPOLoss]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def chosen_nll(b: Batch) -> float:
    return -mean([lp for row in b.rows(b.logps)[0::2] for lp in row])


def margins(b: Batch) -> list[tuple[float, float]]:
    """Return Δc and Δr of each pair."""
    deltas = [sum(lps) - sum(refs) for lps, refs in zip(b.rows(b.logps), b.rows(b.ref), strict=True)]
    return list(zip(deltas[0::2], deltas[1::2], strict=True))


DPO_FORMULAS = {
    "sigmoid": lambda c, r: -log_sigmoid(0.3 * (c - r)),
    "hinge": lambda c, r: max(0.0, 1 - 0.3 * (c - r)),
    "ipo": lambda c, r: (c - r - 1 / 0.6) ** 2,
    "kto_pair": lambda c, r: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r),
}


@pytest.mark.parametrize("sft_weight", [0.0, 0.7])
@pytest.mark.parametrize("loss_type", sorted(DPO_FORMULAS))
def test_dpo(loss_type: str, sft_weight: float) -> None:
    for seed in range(3):
        b = batch(seed, sequences=6)
        loss = DPOLoss(beta=0.3, loss_type=loss_type, sft_weight=sft_weight)
        result = loss(b.inputs, b.outputs, ref_logps=b.ref)
        expected = mean([DPO_FORMULAS[loss_type](c, r) for c, r in margins(b)]) + sft_weight * chosen_nll(b)
        assert result["loss"].item() == pytest.approx(expected, rel=1e-12)
        assert result["num_tokens"] == 0


def test_dpo_smoothing() -> None:
    b = batch(1)
    result = DPOLoss(beta=0.3, label_smoothing=0.2)(b.inputs, b.outputs, ref_logps=b.ref)["loss"]
    expected = mean([-0.8 * log_sigmoid(0.3 * (c - r)) - 0.2 * log_sigmoid(-0.3 * (c - r)) for c, r in margins(b)])
    assert result.item() == pytest.approx(expected)


def test_ipo_rests_where_the_margin_is_half_of_1_over_beta() -> None:
    labels = torch.tensor([[1], [1]])
    outputs = {"logps": torch.tensor([[-1.0], [-6.0]], requires_grad=True)}
    result = DPOLoss(beta=0.1, loss_type="ipo")({"labels": labels}, outputs, ref_logps=torch.zeros(2, 1))["loss"]
    result.backward()
    assert result.item() == 0
    assert (outputs["logps"].grad == 0).all()


def test_dpo_forms_of_the_reference() -> None:
    b = batch(2)
    expected = DPOLoss()(b.inputs, b.outputs, ref_logps=b.ref)["loss"].item()
    sums = [sum(row) for row in b.rows(b.ref)]
    padded = torch.cat([b.ref, torch.full((4, 2), math.nan)], dim=1)
    forms = [
        {"ref_outputs": {"logps": b.ref}},
        {"ref_outputs": {"logps": b.ref.tolist()}},
        {"ref_outputs": {"logps": b.rows(b.ref)}},
        {"ref_logps": padded},
        {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": torch.tensor(sums[1::2], dtype=torch.float64)},
    ]
    for form in forms:
        assert DPOLoss()(b.inputs, b.outputs, **form)["loss"].item() == pytest.approx(expected, rel=1e-9)


def test_dpo_without_a_reference() -> None:
    b = batch(3)
    zeros = torch.zeros_like(b.ref)
    free = DPOLoss(reference_free=True)(b.inputs, b.outputs)["loss"]
    assert free.item() == DPOLoss()(b.inputs, b.outputs, ref_logps=zeros)["loss"].item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DPOLoss()(b.inputs, b.outputs)["loss"].item() == 0
    b.logps.requires_grad_()
    with pytest.warns(UserWarning, match="no reference log-probabilities"):
        result = DPOLoss()(b.inputs, b.outputs)["loss"]
    result.backward()
    assert (b.logps.grad == 0).all()


def test_simpo() -> None:
    b = batch(4)
    averages = [mean(row) for row in b.rows(b.logps)]
    pairs = zip(averages[0::2], averages[1::2], strict=True)
    expected = mean([-log_sigmoid(1.7 * (c - r) - 0.4) for c, r in pairs])
    assert SimPOLoss(beta=1.7, gamma=0.4)(b.inputs, b.outputs)["loss"].item() == pytest.approx(expected)


def test_cpo() -> None:
    b = batch(5)
    sums = [sum(row) for row in b.rows(b.logps)]
    preference = mean([-log_sigmoid(0.2 * (c - r)) for c, r in zip(sums[0::2], sums[1::2], strict=True)])
    result = CPOLoss(beta=0.2, bc_coef=0.5)(b.inputs, b.outputs)["loss"]
    assert result.item() == pytest.approx(preference + 0.5 * chosen_nll(b))


def test_orpo() -> None:
    b = batch(6)
    odds = [mean(row) - math.log(1 - math.exp(mean(row))) for row in b.rows(b.logps)]
    ratio = mean([log_sigmoid(c - r) for c, r in zip(odds[0::2], odds[1::2], strict=True)])
    result = ORPOLoss(lambda_orpo=0.3)(b.inputs, b.outputs)["loss"]
    assert result.item() == pytest.approx(chosen_nll(b) - 0.3 * ratio)


@pytest.mark.parametrize("value", [0.0, -1e-9, -1e-3, -0.69, -0.7, -20.0, -500.0])
def test_orpo_is_finite_for_certain_and_for_hopeless_answers(value: float) -> None:
    logps = torch.tensor([[value], [-1.0]], requires_grad=True)
    result = ORPOLoss()({"labels": torch.tensor([[1], [1]])}, {"logps": logps})["loss"]
    result.backward()
    assert torch.isfinite(result)
    assert torch.isfinite(logps.grad).all()


@pytest.mark.parametrize(
    "loss", [DPOLoss(loss_type=name, sft_weight=0.5) for name in DPO_FORMULAS] + [SimPOLoss(), CPOLoss(), ORPOLoss()]
)
def test_gradient(loss) -> None:
    b = batch(7)

    def value(logps: torch.Tensor) -> torch.Tensor:
        return loss(b.inputs, {"logps": logps}, ref_logps=b.ref)["loss"]

    assert torch.autograd.gradcheck(value, (b.logps.requires_grad_(),))


@pytest.mark.parametrize("make", LOSSES)
def test_padding_is_not_read(make) -> None:
    b = batch(8)
    expected = make()(b.inputs, b.outputs, ref_logps=b.ref)["loss"]
    logps = poisoned(b.logps, b.mask).requires_grad_()
    result = make()(b.inputs, {"logps": logps}, ref_logps=poisoned(b.ref, b.mask))["loss"]
    result.backward()
    assert result.item() == expected.item()
    assert (logps.grad[~b.mask] == 0).all()
    assert torch.isfinite(logps.grad).all()


@pytest.mark.parametrize("make", LOSSES)
def test_a_sequence_without_labels_does_no_harm(make) -> None:
    b = batch(9)
    b.labels[0] = -100
    b.logps.requires_grad_()
    result = make()(b.inputs, b.outputs, ref_logps=b.ref)["loss"]
    result.backward()
    assert torch.isfinite(result)
    assert torch.isfinite(b.logps.grad).all()


@pytest.mark.parametrize("make", LOSSES)
def test_pairs_are_complete(make) -> None:
    b = batch(0, sequences=3)
    with pytest.raises(InvalidInputError, match="got '3 sequences', allowed: an even number"):
        make()(b.inputs, b.outputs, ref_logps=b.ref)


def test_references_that_do_not_fit() -> None:
    b = batch(0)
    with pytest.raises(InvalidInputError, match=r"ref_logps\[0\]: got 'shape \(3,\)'"):
        DPOLoss()(b.inputs, b.outputs, ref_logps=b.ref[:, :3])
    with pytest.raises(InvalidInputError, match="ref_rejected_logps: got None, allowed: given together"):
        DPOLoss()(b.inputs, b.outputs, ref_chosen_logps=[1.0, 2.0])
    with pytest.raises(InvalidInputError, match=r"ref_chosen_logps: got .* one sum for each of the 2 pairs"):
        DPOLoss()(b.inputs, b.outputs, ref_chosen_logps=[1.0], ref_rejected_logps=[1.0])
    with pytest.raises(InvalidInputError, match=r"ref_outputs: got .* must hold 'logps'"):
        DPOLoss()(b.inputs, b.outputs, ref_outputs={"loss": 1.0})


def test_settings_out_of_range() -> None:
    with pytest.raises(UnknownNameError, match="'robust'; known: hinge, ipo, kto_pair, sigmoid"):
        DPOLoss(loss_type="robust")
    with pytest.raises(InvalidInputError, match=r"label_smoothing: got 0\.1, allowed: 0 with loss_type 'ipo'"):
        DPOLoss(loss_type="ipo", label_smoothing=0.1)
    with pytest.raises(InvalidInputError, match=r"label_smoothing: got 0\.5"):
        DPOLoss(label_smoothing=0.5)
    for make in (CPOLoss, DPOLoss, SimPOLoss):
        with pytest.raises(InvalidInputError, match="beta: got 0"):
            make(beta=0)


def test_cpo_alpha_is_bc_coef() -> None:
    b = batch(0)
    values = [loss(b.inputs, {"logps": b.logps})["loss"] for loss in (CPOLoss(cpo_alpha=3.0), CPOLoss(bc_coef=3.0))]
    assert values[0] == values[1] != CPOLoss()(b.inputs, {"logps": b.logps})["loss"]
    with pytest.raises(InvalidInputError, match=r"cpo_alpha: got 3.0, allowed: nothing beside bc_coef=2.0"):
        CPOLoss(bc_coef=2.0, cpo_alpha=3.0)
