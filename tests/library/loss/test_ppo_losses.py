"""The losses of PPO, against worked examples and loops over tokens."""

import math

import numpy as np
import pytest
import torch

from tests.support.losses.batches import batch, poisoned
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.loss import BNPOLoss, GRPOLoss, PPOLoss, PPOValueLoss
from twinkle.metric import PPOValueMetric

# --- the policy -------------------------------------------------------------------------------------------------------


def policy_terms(b, advantages, epsilon, high):
    """Return the terms of each sequence's tokens. Advantages are per token."""
    result = []
    for logps, olds, values in zip(b.rows(b.logps), b.rows(b.old), b.rows(advantages), strict=True):
        ratios = [np.exp(lp - old) for lp, old in zip(logps, olds, strict=True)]
        clipped = [min(max(r, 1 - epsilon), 1 + high) for r in ratios]
        result.append([-min(r * a, c * a) for r, c, a in zip(ratios, clipped, values, strict=True)])
    return result


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_policy_formula(mode: str) -> None:
    for seed in range(3):
        b = batch(seed)
        advantages = torch.randn(b.logps.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        terms = policy_terms(b, advantages, 0.2, 0.3)
        expected = sum(map(sum, terms)) / sum(map(len, terms))
        if mode == "seq-mean-token-mean":
            expected = sum(sum(row) / len(row) for row in terms) / len(terms)
        loss = PPOLoss(mode, epsilon=0.2, epsilon_high=0.3)
        for given in (poisoned(advantages, b.mask), b.rows(advantages)):
            result = loss(b.inputs, b.outputs, old_logps=b.rows(b.old), advantages=given)
            assert result["loss"].item() == pytest.approx(expected, rel=1e-12)
            assert result["num_tokens"] == 0


def test_it_is_grpo_with_another_mean() -> None:
    b = batch(2)
    arguments = {"old_logps": b.old, "ref_logps": b.ref, "advantages": b.advantages}
    options = {"epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.2, "entropy_coef": 0.05}
    ours = [PPOLoss(**options), PPOLoss("seq-mean-token-mean", **options)]
    for loss, same in zip(ours, (BNPOLoss(**options), GRPOLoss(**options)), strict=True):
        assert loss(b.inputs, b.outputs, **arguments)["loss"] == same(b.inputs, b.outputs, **arguments)["loss"]
    assert PPOLoss("token-mean", 0.3).epsilon == PPOLoss(clip_range=0.3).epsilon == 0.3


def test_the_first_argument_is_the_mode() -> None:
    with pytest.raises(InvalidInputError, match=r"loss_agg_mode: got 0\.2, allowed: .*epsilon=0\.2"):
        PPOLoss(0.2)
    with pytest.raises(UnknownNameError, match="'sum'; known: seq-mean-token-mean, token-mean"):
        PPOLoss("sum")


# --- the critic -------------------------------------------------------------------------------------------------------


def value_loss(values, old, returns, **options) -> float:
    values = torch.tensor([values])
    inputs = {"labels": torch.ones(values.shape, dtype=torch.long)}
    return PPOValueLoss(**options)(inputs, {"values": values}, old_values=[old], returns=[returns])["loss"].item()


def test_worked_examples() -> None:
    assert value_loss([2.0], [0.0], [1.0], epsilon=0.2) == pytest.approx(0.5)
    assert value_loss([0.0, 1.0], [0.0, 1.0], [1.0, 1.0]) == pytest.approx(0.25)


def value_terms(values, old, returns, epsilon):
    for v, o, r in zip(values, old, returns, strict=True):
        clipped = o + min(max(v - o, -epsilon), epsilon)
        yield 0.5 * max((v - r) ** 2, (clipped - r) ** 2)


def critic_batch(seed: int):
    b = batch(seed)
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(b.logps.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return b, values, values + 0.3 * old, returns


def given(values, b, form):
    """Return values of tokens in one of the forms that callers may give."""
    if form == "ragged":
        return b.rows(values)
    if form == "padded rows":
        ends = [1 + int(np.flatnonzero(mask)[-1]) for mask in b.mask]
        return [row[:end] for row, end in zip(values, ends, strict=True)]
    if form == "longer":
        return torch.nn.functional.pad(values, (0, 3), value=9.0)
    return poisoned(values, b.mask).numpy() if form == "numpy" else poisoned(values, b.mask)


@pytest.mark.parametrize("form", ["ragged", "padded rows", "full length", "numpy", "longer"])
def test_value_formula_and_alignment(form: str) -> None:
    for seed in range(3):
        b, values, old, returns = critic_batch(seed)
        rows = zip(b.rows(values), b.rows(old), b.rows(returns), strict=True)
        terms = [term for row in rows for term in value_terms(*row, 0.2)]
        for shape in (values, values[..., None]):
            result = PPOValueLoss()(
                b.inputs, {"values": shape}, old_values=given(old, b, form), returns=given(returns, b, form)
            )
            assert result["loss"].item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)
            assert result["num_tokens"] == 0


def test_value_gradient() -> None:
    b, values, old, returns = critic_batch(1)

    def loss(values):
        return PPOValueLoss()(b.inputs, {"values": values}, old_values=old, returns=returns)["loss"]

    assert torch.autograd.gradcheck(loss, values.requires_grad_())
    bad = poisoned(values.detach(), b.mask).requires_grad_()
    loss(bad).backward()
    expected = torch.autograd.grad(loss(values), values)[0]
    torch.testing.assert_close(bad.grad, expected)
    assert (expected[~b.mask] == 0).all()


def test_value_mistakes() -> None:
    b, values, old, returns = critic_batch(0)
    outputs, arguments = {"values": values}, {"old_values": old, "returns": returns}
    for name in arguments:
        with pytest.raises(InvalidInputError, match=f"{name}: got None"):
            PPOValueLoss()(b.inputs, outputs, **{**arguments, name: None})
    with pytest.raises(InvalidInputError, match="must hold 'values'"):
        PPOValueLoss()(b.inputs, b.outputs, **arguments)
    with pytest.raises(InvalidInputError, match=r"outputs: got '?shape"):
        PPOValueLoss()(b.inputs, {"values": values[:, 1:]}, **arguments)
    with pytest.raises(InvalidInputError, match=r"returns\[0\]: got '?shape"):
        PPOValueLoss()(b.inputs, outputs, old_values=old, returns=[[1.0]] * 4)
    for epsilon in (-1, None, "wide", True, math.nan):
        for made in (PPOValueLoss, PPOLoss, PPOValueMetric):
            with pytest.raises(InvalidInputError, match=f"epsilon: got {epsilon!r}"):
                made(epsilon=epsilon)
    nothing = {"labels": torch.full_like(b.labels, -100)}
    assert PPOValueLoss()(nothing, outputs, **arguments)["loss"] == 0
    assert PPOValueLoss.require_values
    assert not PPOValueLoss.require_logps
