"""GRPO and related losses, compared with loops over tokens."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.losses.batches import Batch, batch, poisoned
from twinkle.errors import InvalidInputError
from twinkle.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss

CLASSES = [BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss]


def clip(r: float, low: float, high: float) -> float:
    return min(max(r, low), high)


def grpo_term(r: float, a: float, lp: float) -> float:
    return -min(r * a, clip(r, 0.8, 1.3) * a)


def sapo_term(r: float, a: float, lp: float) -> float:
    tau = 1.5 if a > 0 else 0.7
    return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a


def cispo_term(r: float, a: float, lp: float) -> float:
    return -min(r, 1.3) * a * lp


def by_loop(b: Batch, term: Callable[[float, float, float], float], beta: float, coef: float, sequence: bool):
    """Return the terms of each sequence's tokens."""
    result = []
    rows = zip(b.rows(b.logps), b.rows(b.old), b.rows(b.ref), b.rows(b.entropies), b.advantages.tolist(), strict=True)
    for logps, olds, refs, entropies, a in rows:
        mean = sum(lp - old for lp, old in zip(logps, olds, strict=True)) / len(logps)
        terms = []
        for lp, old, ref, entropy in zip(logps, olds, refs, entropies, strict=True):
            r = math.exp(mean if sequence else lp - old)
            terms.append(term(r, a, lp) + beta * (math.exp(ref - lp) - (ref - lp) - 1) - coef * entropy)
        result.append(terms)
    return result


def mean_of_means(terms: list[list[float]]) -> float:
    return sum(sum(row) / len(row) for row in terms) / len(terms)


def token_mean(terms: list[list[float]]) -> float:
    return sum(map(sum, terms)) / sum(map(len, terms))


FORMULAS = {
    GRPOLoss: ({"epsilon": 0.2, "epsilon_high": 0.3}, grpo_term, mean_of_means, False),
    GSPOLoss: ({"epsilon": 0.2, "epsilon_high": 0.3}, grpo_term, mean_of_means, True),
    BNPOLoss: ({"epsilon": 0.2, "epsilon_high": 0.3}, grpo_term, token_mean, False),
    DRGRPOLoss: (
        {"epsilon": 0.2, "epsilon_high": 0.3, "max_completion_length": 50},
        grpo_term,
        lambda terms: sum(map(sum, terms)) / (len(terms) * 50),
        False,
    ),
    SAPOLoss: ({"tau_pos": 1.5, "tau_neg": 0.7}, sapo_term, mean_of_means, False),
    CISPOLoss: ({"epsilon_high": 0.3}, cispo_term, token_mean, False),
}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("coef", [0.0, 0.01])
@pytest.mark.parametrize("loss", CLASSES)
def test_formula(loss, beta: float, coef: float) -> None:
    config, term, aggregate, sequence = FORMULAS[loss]
    for seed in range(3):
        b = batch(seed)
        result = loss(**config, beta=beta, entropy_coef=coef)(
            b.inputs, b.outputs, old_logps=b.old, ref_logps=b.ref, advantages=b.advantages
        )
        assert result["loss"].item() == pytest.approx(aggregate(by_loop(b, term, beta, coef, sequence)), rel=1e-12)
        assert result["num_tokens"] == 0


def test_the_examples_are_clipped_on_both_sides() -> None:
    b = batch(0)
    ratio = torch.exp(b.logps - b.old)[b.mask]
    assert (ratio < 0.8).any()
    assert (ratio > 1.3).any()
    assert ((ratio > 0.8) & (ratio < 1.3)).any()


@pytest.mark.parametrize("loss", [BNPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss])
def test_gradient(loss) -> None:
    b = batch(1)
    instance = loss(beta=0.3, entropy_coef=0.1)

    def value(logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        outputs = {"logps": logps, "entropies": entropies}
        return instance(b.inputs, outputs, old_logps=b.old, ref_logps=b.ref, advantages=b.advantages)["loss"]

    assert torch.autograd.gradcheck(value, (b.logps.requires_grad_(), b.entropies.requires_grad_()))


def test_gradient_of_cispo_leaves_the_weight_alone() -> None:
    """Finite differences would also differentiate the ratio, which is a constant here.

    The gradient is −c·A / tokens.
    """
    b = batch(1)
    b.logps.requires_grad_()
    CISPOLoss(epsilon=0.2)(b.inputs, b.outputs, old_logps=b.old, advantages=b.advantages)["loss"].backward()
    weight = torch.exp(b.logps.detach() - b.old).clamp(max=1.2)
    expected = torch.where(b.mask, -weight * b.advantages[:, None], 0.0) / b.mask.sum()
    torch.testing.assert_close(b.logps.grad, expected)


@pytest.mark.parametrize("loss", CLASSES)
def test_tokens_without_a_label_add_nothing_whatever_stands_there(loss) -> None:
    b = batch(2)
    instance = loss(beta=0.3, entropy_coef=0.1)
    gradients = []
    for change in (lambda values, _: values, poisoned):
        outputs = {
            "logps": change(b.logps, b.mask).clone().requires_grad_(),
            "entropies": change(b.entropies, b.mask).clone().requires_grad_(),
        }
        arguments = {"old_logps": change(b.old, b.mask), "ref_logps": change(b.ref, b.mask)}
        result = instance(b.inputs, outputs, **arguments, advantages=b.advantages)["loss"]
        result.backward()
        gradients.append((result.detach(), outputs["logps"].grad, outputs["entropies"].grad))
    for plain, with_poison in zip(*gradients, strict=True):
        assert torch.equal(plain, with_poison)
    assert (gradients[1][1][~b.mask] == 0).all()
    assert (gradients[1][2][~b.mask] == 0).all()


@pytest.mark.parametrize("loss", [BNPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss])
@pytest.mark.parametrize("distance", [-1e4, 1e4])
def test_ratios_do_not_overflow(loss, distance: float) -> None:
    b = batch(3, dtype=torch.float32)
    b.logps.requires_grad_()
    loss()(b.inputs, b.outputs, old_logps=b.logps.detach() - distance, advantages=b.advantages)["loss"].backward()
    assert torch.isfinite(b.logps.grad).all()


@pytest.mark.parametrize("loss", CLASSES)
def test_sequences_without_any_label_do_no_harm(loss) -> None:
    b = batch(4)
    b.labels[2] = -100
    b.logps.requires_grad_()
    result = loss()(b.inputs, b.outputs, old_logps=b.old, advantages=b.advantages)["loss"]
    result.backward()
    assert torch.isfinite(result)
    assert (b.logps.grad[2] == 0).all()
    nothing = {"labels": torch.full_like(b.labels, -100)}
    assert loss()(nothing, b.outputs, old_logps=b.old, advantages=b.advantages)["loss"].item() == 0


def test_without_old_logps_the_ratio_is_1_and_has_a_gradient() -> None:
    b = batch(5)
    b.logps.requires_grad_()
    result = GRPOLoss()(b.inputs, b.outputs, advantages=b.advantages)["loss"]
    result.backward()
    assert result.item() == pytest.approx(-b.advantages.mean().item())
    expected = -(b.mask * b.advantages[:, None]) / b.mask.sum(-1, keepdim=True) / len(b.labels)
    torch.testing.assert_close(b.logps.grad, expected)


@pytest.mark.parametrize("loss", CLASSES)
def test_without_advantages_the_loss_is_0_and_training_is_warned(loss) -> None:
    b = batch(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss()(b.inputs, b.outputs)["loss"].item() == 0
    outputs = {"logps": poisoned(b.logps, b.mask).requires_grad_()}
    with pytest.warns(UserWarning, match="no advantages were given"):
        result = loss()(b.inputs, outputs)
    result["loss"].backward()
    assert (outputs["logps"].grad == 0).all()


def test_cispo_divides_by_the_items_of_the_whole_batch() -> None:
    b = batch(7)
    arguments = {"old_logps": b.old, "advantages": b.advantages}
    alone = CISPOLoss()(b.inputs, b.outputs, **arguments)["loss"]
    shared = CISPOLoss()(b.inputs, b.outputs, **arguments, num_items_in_batch=100)["loss"]
    assert shared.item() == pytest.approx(alone.item() * b.mask.sum().item() / 100)
    with pytest.raises(InvalidInputError, match="num_items_in_batch: got 0, allowed: above 0"):
        CISPOLoss()(b.inputs, b.outputs, **arguments, num_items_in_batch=0)


@pytest.mark.parametrize("form", ["rows", "numpy rows", "full rows", "short full rows", "longer tensor", "tensor"])
def test_forms_of_old_logps(form: str) -> None:
    """From a sampler (one value per label) or from another model (one per position), with or without its padding."""
    b = batch(8)
    last = [int(row.nonzero()[-1]) for row in b.mask]
    forms = {
        "rows": b.rows(b.old),
        "numpy rows": [np.array(row) for row in b.rows(b.old)],
        "full rows": b.old.tolist(),
        "short full rows": [row[: end + 1].tolist() for row, end in zip(b.old, last, strict=True)],
        "longer tensor": torch.cat([b.old, torch.full((4, 3), math.nan, dtype=torch.float64)], dim=1),
        "tensor": b.old.float().double(),
    }
    expected = GRPOLoss()(b.inputs, b.outputs, old_logps=b.old, advantages=b.advantages)["loss"]
    result = GRPOLoss()(b.inputs, b.outputs, old_logps=forms[form], advantages=b.advantages)["loss"]
    assert result.item() == pytest.approx(expected.item(), rel=1e-6)


def test_forms_of_advantages() -> None:
    b = batch(9)
    expected = GRPOLoss()(b.inputs, b.outputs, old_logps=b.old, advantages=b.advantages)["loss"]
    per_token = b.advantages[:, None].expand(b.labels.shape)
    for form in (b.advantages.tolist(), b.advantages[:, None], per_token, list(b.advantages), b.advantages.numpy()):
        result = GRPOLoss()(b.inputs, b.outputs, old_logps=b.old, advantages=form)["loss"]
        assert result.item() == pytest.approx(expected.item(), rel=1e-12)
    varied = b.rows(per_token * torch.arange(7))
    result = GRPOLoss()(b.inputs, b.outputs, old_logps=b.old, advantages=varied)["loss"]
    whole = GRPOLoss()(b.inputs, b.outputs, old_logps=b.old, advantages=per_token * torch.arange(7))["loss"]
    assert result.item() == whole.item() != expected.item()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0], [1.0], [1.0], [1.0, 2.0]], r"old_logps\[0\]: got 'shape \(1,\)', allowed: 5 values"),
        ([1.0, 2.0], r"old_logps: got '2 entries', allowed: .* each of the 4 sequences"),
        (torch.zeros(4, 7, 2), r"old_logps: got 'shape \(4, 7, 2\)'"),
        ([None, 1.0, 1.0, 1.0], r"old_logps\[0\]: got None, allowed: a number, or a row of numbers"),
    ],
)
def test_values_that_do_not_fit(values: object, message: str) -> None:
    b = batch(0)
    with pytest.raises(InvalidInputError, match=message):
        GRPOLoss()(b.inputs, b.outputs, old_logps=values, advantages=b.advantages)


def test_arguments_that_a_setting_needs() -> None:
    b = batch(0)
    with pytest.raises(InvalidInputError, match=r"ref_logps: got None, allowed: .* as beta is 0\.1"):
        GRPOLoss(beta=0.1)(b.inputs, b.outputs, advantages=b.advantages)
    with pytest.raises(InvalidInputError, match="must hold 'entropies'"):
        GRPOLoss(entropy_coef=0.1)(b.inputs, {"logps": b.logps}, advantages=b.advantages)
    with pytest.raises(InvalidInputError, match="must hold 'logps'"):
        GRPOLoss()(b.inputs, {}, advantages=b.advantages)
    assert GRPOLoss(entropy_coef=0.1).require_entropy
    assert not GRPOLoss().require_entropy


@pytest.mark.parametrize(
    ("loss", "config", "field"),
    [
        (GRPOLoss, {"epsilon": -0.1}, "epsilon"),
        (GRPOLoss, {"epsilon_high": math.nan}, "epsilon_high"),
        (GRPOLoss, {"beta": math.inf}, "beta"),
        (SAPOLoss, {"tau_neg": 0.0}, "tau_neg"),
        (DRGRPOLoss, {"max_completion_length": 0}, "max_completion_length"),
    ],
)
def test_settings_out_of_range(loss, config: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: got "):
        loss(**config)


def test_low_precision_is_computed_in_float32() -> None:
    b = batch(3, dtype=torch.float32)
    logps = b.logps.bfloat16().requires_grad_()
    result = GRPOLoss()(b.inputs, {"logps": logps}, old_logps=b.old, advantages=b.advantages)["loss"]
    assert result.dtype == torch.float32
    same = GRPOLoss()(b.inputs, {"logps": logps.detach().float()}, old_logps=b.old, advantages=b.advantages)["loss"]
    assert result.item() == same.item()


@pytest.mark.parametrize("loss", [BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss])
def test_clip_range_is_epsilon(loss) -> None:
    b = batch(0)
    call = {"old_logps": b.old, "advantages": b.advantages}
    narrow, wide = (loss(clip_range=value)(b.inputs, {"logps": b.logps}, **call)["loss"] for value in (0.01, 5.0))
    assert narrow == loss(epsilon=0.01)(b.inputs, {"logps": b.logps}, **call)["loss"]
    assert narrow != wide
    assert loss(epsilon=0.3, clip_range=0.3).epsilon_high == 0.3
    with pytest.raises(InvalidInputError, match=r"clip_range: got 0.1, allowed: nothing beside epsilon=0.3"):
        loss(epsilon=0.3, clip_range=0.1)


def test_tau_sets_both_gates_of_sapo() -> None:
    loss = SAPOLoss(tau=0.5, clip_range=0.3)  # no effect: SAPO does not clip
    assert (loss.tau_pos, loss.tau_neg) == (0.5, 0.5)
    with pytest.raises(InvalidInputError, match=r"tau: got 0\.5, allowed: nothing beside tau_neg=2"):
        SAPOLoss(tau=0.5, tau_neg=2.0)
