"""Each loss, compared with its formula, which is written here again in numpy and float64."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import twinkle.loss
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.loss import TOKEN_LOSSES, coefficients, get_loss, resolve_config

Array = NDArray[np.float64]
Arrays = Mapping[str, NDArray[np.generic]]

POLICY_LOSSES = ["importance_sampling", "ppo", "cispo", "gspo"]  # tokens with A = 0 are masked
CLIPPED_LOSSES = ["ppo", "cispo", "gspo"]


# --- the formulas; `fixed` is lp inside stopgrad ----------------------------------------------------------------------


def cross_entropy(lp: Array, fixed: Array, x: Arrays) -> Array:
    return -x["weights"] * lp


def importance_sampling(lp: Array, fixed: Array, x: Arrays) -> Array:
    return -np.exp(lp - x["logprobs"]) * x["advantages"]


def ppo(lp: Array, fixed: Array, x: Arrays) -> Array:
    r = np.exp(lp - x["logprobs"])
    a = x["advantages"]
    return -np.minimum(r * a, np.clip(r, x["clip_low_threshold"], x["clip_high_threshold"]) * a)


def cispo(lp: Array, fixed: Array, x: Arrays) -> Array:
    c = np.clip(np.exp(fixed - x["logprobs"]), x["clip_low_threshold"], x["clip_high_threshold"])
    return -c * lp * x["advantages"]


def dro(lp: Array, fixed: Array, x: Arrays) -> Array:
    return -(lp * x["advantages"] - 0.5 * x["beta"] * (lp - x["logprobs"]) ** 2)


def gspo(lp: Array, fixed: Array, x: Arrays) -> Array:
    length = np.zeros_like(lp)
    for sequence in np.unique(x["sequence"]):
        inside = x["sequence"] == sequence
        counted = inside & (x["sequence_ratio_mask"] != 0)
        length[inside] = np.mean((fixed - x["logprobs"])[counted]) if counted.any() else 0.0
    s = np.exp(length + lp - fixed)
    a = x["advantages"]
    return -np.minimum(s * a, np.clip(s, x["clip_low_threshold"], x["clip_high_threshold"]) * a)


FORMULAS: dict[str, Callable[[Array, Array, Arrays], Array]] = {
    "cispo": cispo,
    "cross_entropy": cross_entropy,
    "dro": dro,
    "gspo": gspo,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
}


def example(name: str, seed: int, sequences: int = 5, length: int = 12) -> tuple[Array, dict[str, NDArray[np.generic]]]:
    """Return lp and every input of the loss for a few sequences.

    Some advantages are 0; ratios lie between about 0.3 and 3.
    """
    rng = np.random.default_rng(seed)
    n = sequences * length
    lp = -rng.exponential(2.0, n)
    x: dict[str, NDArray[np.generic]] = {
        "weights": rng.normal(size=n),
        "logprobs": lp + rng.uniform(-1.0, 1.0, n),
        "advantages": rng.normal(size=n) * (rng.random(n) < 0.8),
        "sequence_ratio_mask": (rng.random(n) < 0.7).astype(np.float64),
        "sequence": np.repeat(np.arange(sequences), length),
    }
    # the mean ratios of sequences differ enough to be clipped on either side
    x["logprobs"] = x["logprobs"] + np.repeat(rng.uniform(-0.5, 0.5, sequences), length)
    loss = TOKEN_LOSSES[name]
    names = {*loss.inputs, *loss.optional_inputs, *([] if loss.pointwise else ["sequence"])}
    return lp, {key: x[key] for key in x if key in names} | {key: np.array(value) for key, value in loss.config.items()}


def tensors(x: Arrays, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v) if v.dtype == np.int64 else torch.from_numpy(v).to(dtype) for k, v in x.items()}


def exact_gradient(name: str, lp: Array, x: Arrays) -> Array:
    """Return the gradient from autograd in float64; `coefficients` rounds it to float32."""
    variable = torch.from_numpy(lp).requires_grad_()
    (gradient,) = torch.autograd.grad(get_loss(name).terms(variable, tensors(x)).sum(), variable)
    return gradient.numpy()


# --- values and gradients ---------------------------------------------------------------------------------------------


def test_every_loss_has_a_formula_here() -> None:
    assert sorted(TOKEN_LOSSES) == sorted(FORMULAS)
    assert all(name == loss.name for name, loss in TOKEN_LOSSES.items())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_terms_equal_the_formula(name: str, seed: int) -> None:
    lp, x = example(name, seed)
    terms = get_loss(name).terms(torch.from_numpy(lp), tensors(x))
    np.testing.assert_allclose(terms.numpy(), FORMULAS[name](lp, lp, x), rtol=1e-12, atol=1e-14)
    assert terms.shape == lp.shape


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_coefficients_equal_finite_differences(name: str, seed: int) -> None:
    lp, x = example(name, seed)
    step = 1e-6
    plus, minus = FORMULAS[name](lp + step, lp, x), FORMULAS[name](lp - step, lp, x)
    # with the stopgrad parts fixed, a term depends only on its own lp, so one difference serves all tokens
    numeric = (plus - minus) / (2 * step)
    np.testing.assert_allclose(exact_gradient(name, lp, x), numeric, rtol=1e-7, atol=1e-8)
    result = coefficients(get_loss(name), torch.from_numpy(lp), tensors(x))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CLIPPED_LOSSES)
def test_the_examples_are_clipped_on_both_sides(name: str) -> None:
    """Otherwise the tests above would prove little. cispo's default lower bound is 0, which no ratio passes."""
    lp, x = example(name, seed=0)
    x |= {"clip_low_threshold": np.array(0.8), "clip_high_threshold": np.array(1.2)}
    ratio = np.exp(lp - x["logprobs"])
    if name == "gspo":
        ratio = FORMULAS["gspo"](lp, lp, x | {"advantages": np.array(-1.0), "clip_low_threshold": np.array(0.0)})
    assert (ratio < 0.8).any()
    assert (ratio > 1.2).any()
    assert ((ratio > 0.8) & (ratio < 1.2)).any()
    assert 0 < get_loss(name).diagnostics(torch.from_numpy(lp), tensors(x))[f"{name}_clipped_fraction:mean"] < 1


def test_pointwise_is_declared_truthfully() -> None:
    for name, loss in TOKEN_LOSSES.items():
        lp, x = example(name, seed=4)
        x |= {"sequence_ratio_mask": np.ones_like(lp)} if name == "gspo" else {}
        before = exact_gradient(name, lp, x)
        lp[0] += 0.01
        changed = np.flatnonzero(exact_gradient(name, lp, x) != before)
        assert (set(changed) <= {0}) == loss.pointwise


def test_coefficients_under_no_grad_leave_lp_alone() -> None:
    lp, x = example("ppo", seed=0)
    variable = torch.from_numpy(lp).requires_grad_()
    with torch.no_grad():
        result = coefficients(get_loss("ppo"), variable, tensors(x))
    assert variable.grad is None
    assert not result.requires_grad
    np.testing.assert_allclose(result.numpy(), exact_gradient("ppo", lp, x), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_no_tokens(name: str) -> None:
    lp, x = example(name, seed=0, sequences=0)
    assert coefficients(get_loss(name), torch.from_numpy(lp), tensors(x)).shape == (0,)
    assert set(get_loss(name).diagnostics(torch.from_numpy(lp), tensors(x)).values()) <= {0.0}


# --- cross entropy ----------------------------------------------------------------------------------------------------


def test_cross_entropy_of_topk_targets() -> None:
    rng = np.random.default_rng(0)
    lp = -rng.exponential(3.0, (7, 4))
    weights = rng.choice([-1.5, -0.25, 0.0, 0.125, 2.0], (7, 4))
    x = {"weights": torch.from_numpy(weights)}
    terms = get_loss("cross_entropy").terms(torch.from_numpy(lp), x)
    np.testing.assert_allclose(terms.numpy(), -weights * lp, rtol=1e-15)
    result = coefficients(get_loss("cross_entropy"), torch.from_numpy(lp), x)
    np.testing.assert_array_equal(result.numpy(), -weights)
    assert [name for name, loss in TOKEN_LOSSES.items() if loss.allows_topk] == ["cross_entropy"]


def test_cross_entropy_without_weights_counts_every_target_once() -> None:
    lp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    assert get_loss("cross_entropy").terms(lp, {}).sum().item() == 10.0


def test_cross_entropy_ignores_impossible_targets_of_weight_0() -> None:
    lp = torch.tensor([-math.inf, -1.0, -math.inf])
    x = {"weights": torch.tensor([0.0, 1.0, 1.0])}
    assert get_loss("cross_entropy").terms(lp, x).tolist() == [0.0, 1.0, math.inf]
    assert coefficients(get_loss("cross_entropy"), lp, x).tolist() == [0.0, -1.0, -1.0]


# --- config -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ppo", {"clip_low_threshold": 0.5}),
        ("cispo", {"clip_high_threshold": 1.1}),
        ("gspo", {"clip_low_threshold": 0.95}),
    ],
)
def test_config_values_may_differ_between_tokens(name: str, value: dict[str, float]) -> None:
    lp, x = example(name, seed=5)
    rng = np.random.default_rng(6)
    per_token = {key: np.where(rng.random(len(lp)) < 0.5, x[key], new) for key, new in value.items()}
    mixed = get_loss(name).terms(torch.from_numpy(lp), tensors(x | per_token)).numpy()
    np.testing.assert_allclose(mixed, FORMULAS[name](lp, lp, x | per_token), rtol=1e-12, atol=1e-14)
    plain = get_loss(name).terms(torch.from_numpy(lp), tensors(x)).numpy()
    assert (mixed != plain).any()


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_tenants_in_one_call_get_what_they_get_alone(name: str) -> None:
    """Bit for bit, even if a neighbour's numbers are not finite."""
    loss = get_loss(name)
    configs = [{key: value * factor for key, value in loss.config.items()} for factor in (1.0, 0.9, 1.3)]
    alone, together, offset = [], [], 0
    for seed, (sequences, length) in enumerate([(3, 7), (1, 33), (4, 130)]):
        lp, x = example(name, seed, sequences, length)
        x |= {key: np.full(len(lp), value) for key, value in configs[seed].items()}
        if seed == 1:
            lp[3] = np.nan
        alone.append((torch.from_numpy(lp).float(), tensors(x, torch.float32)))
        shifted = x | ({"sequence": x["sequence"] + offset} if name == "gspo" else {})
        together.append((torch.from_numpy(lp).float(), tensors(shifted, torch.float32)))
        offset += sequences
    lp_all = torch.cat([lp for lp, _ in together])
    x_all = {key: torch.cat([x[key] for _, x in together]) for key in together[0][1]}
    for evaluate in (loss.terms, lambda lp, x: coefficients(loss, lp, x)):
        separate = torch.cat([evaluate(lp, x) for lp, x in alone])
        assert torch.equal(evaluate(lp_all, x_all).nan_to_num(nan=7.0), separate.nan_to_num(nan=7.0))


def test_gspo_sequences_may_be_interleaved() -> None:
    lp, x = example("gspo", seed=7)
    expected = get_loss("gspo").terms(torch.from_numpy(lp), tensors(x)).numpy()
    order = np.random.default_rng(8).permutation(len(lp))
    shuffled = {key: value[order] if value.ndim else value for key, value in x.items()}
    result = get_loss("gspo").terms(torch.from_numpy(lp[order]), tensors(shuffled)).numpy()
    np.testing.assert_allclose(result, expected[order], rtol=1e-12)


def test_gspo_sequence_without_counted_tokens_has_ratio_1() -> None:
    lp = torch.tensor([-1.0, -2.0, -3.0])
    x = {
        "logprobs": torch.tensor([-5.0, -5.0, -3.0]),
        "advantages": torch.tensor([2.0, -1.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([0.0, 0.0, 1.0]),
        "sequence": torch.tensor([0, 0, 1]),
        "clip_low_threshold": torch.tensor(0.8),
        "clip_high_threshold": torch.tensor(1.2),
    }
    assert get_loss("gspo").terms(lp, x).tolist() == [-2.0, 1.0, -1.0]
    assert coefficients(get_loss("gspo"), lp, x).tolist() == [-2.0, 1.0, -1.0]
    assert get_loss("gspo").diagnostics(lp, x)["gspo_ratio:mean"] == 1.0


# --- overflow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage_elsewhere", [0.0, 1.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_tokens_without_advantage_add_nothing_even_if_their_ratio_overflows(
    name: str, advantage_elsewhere: float
) -> None:
    lp = torch.tensor([-1.0, -math.inf, -1.0, -2.0])
    x = {
        "logprobs": torch.tensor([-1000.0, 0.0, 1000.0, -2.0]),
        "advantages": torch.tensor([0.0, 0.0, 0.0, advantage_elsewhere]),
        "sequence_ratio_mask": torch.tensor([0.0, 0.0, 0.0, 1.0]),
        "sequence": torch.zeros(4, dtype=torch.int64),
    } | {key: torch.tensor(value) for key, value in get_loss(name).config.items()}
    assert get_loss(name).terms(lp, x)[:3].tolist() == [0.0, 0.0, 0.0]
    result = coefficients(get_loss(name), lp, x)
    assert result[:3].tolist() == [0.0, 0.0, 0.0]
    assert result[3].item() == -advantage_elsewhere


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_an_overflow_that_counts_stays_visible(name: str) -> None:
    x = {
        "logprobs": torch.tensor([-1000.0, -1.0]),
        "advantages": torch.tensor([-1.0, 1.0]),
        "sequence_ratio_mask": torch.ones(2),
        "sequence": torch.tensor([0, 1]),
    } | {key: torch.tensor(value) for key, value in get_loss(name).config.items()}
    lp = torch.tensor([-1.0, -1.0])
    assert get_loss(name).terms(lp, x).tolist() == [math.inf, -1.0]
    assert coefficients(get_loss(name), lp, x).tolist() == [math.inf, -1.0]


def test_cispo_clamps_an_overflow() -> None:
    x = {"logprobs": torch.tensor([-1000.0]), "advantages": torch.tensor([1.0])}
    x |= {"clip_low_threshold": torch.tensor(0.0), "clip_high_threshold": torch.tensor(4.0)}
    assert coefficients(get_loss("cispo"), torch.tensor([-1.0]), x).tolist() == [-4.0]


# --- diagnostics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dro", "importance_sampling", "ppo", "cispo"])
def test_ratio_diagnostics(name: str) -> None:
    lp, x = example(name, seed=9)
    metrics = get_loss(name).diagnostics(torch.from_numpy(lp), tensors(x))
    log_ratio = (lp - x["logprobs"])[x["advantages"] != 0]
    assert metrics[f"{name}_kl_div:mean"] == pytest.approx(-log_ratio.mean(), rel=1e-6)
    assert metrics[f"{name}_ratio:mean"] == pytest.approx(np.exp(log_ratio).mean(), rel=1e-6)
    assert metrics[f"{name}_ratio:max"] == pytest.approx(np.exp(log_ratio).max(), rel=1e-6)


def test_ppo_clipped_fraction_counts_tokens_without_gradient() -> None:
    lp, x = example("ppo", seed=10)
    metrics = get_loss("ppo").diagnostics(torch.from_numpy(lp), tensors(x))
    active = x["advantages"] != 0
    stopped = (exact_gradient("ppo", lp, x) == 0)[active]
    assert metrics["ppo_clipped_fraction:mean"] == pytest.approx(stopped.mean(), rel=1e-6)


def test_cispo_clipped_fraction_counts_ratios_outside_the_bounds() -> None:
    lp, x = example("cispo", seed=10)
    x |= {"clip_low_threshold": np.array(0.7), "clip_high_threshold": np.array(1.5)}
    ratio = np.exp(lp - x["logprobs"])[x["advantages"] != 0]
    metrics = get_loss("cispo").diagnostics(torch.from_numpy(lp), tensors(x))
    assert metrics["cispo_clipped_fraction:mean"] == pytest.approx(((ratio < 0.7) | (ratio > 1.5)).mean(), rel=1e-6)


def test_gspo_diagnostics_count_sequences() -> None:
    """The ratios are e, 1 and 1/e; the fourth sequence has no advantage and does not count."""
    x = {
        "logprobs": torch.tensor([-2.0, -2.0, -1.0, 0.0, 0.0, -9.0]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        "sequence_ratio_mask": torch.ones(6),
        "sequence": torch.tensor([0, 0, 1, 2, 2, 3]),
        "clip_low_threshold": torch.tensor(0.8),
        "clip_high_threshold": torch.tensor(1.2),
    }
    metrics = get_loss("gspo").diagnostics(torch.full((6,), -1.0), x)
    assert metrics == pytest.approx(
        {
            "gspo_kl_div:mean": (-1 - 1 + 0 + 1) / 4,
            "gspo_ratio:mean": (math.e + 1 + 1 / math.e) / 3,
            "gspo_ratio:max": math.e,
            "gspo_clipped_fraction:mean": 1 / 3,
        }
    )


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_diagnostics_are_finite_and_well_named(name: str) -> None:
    lp, x = example(name, seed=11)
    for advantages in (np.zeros_like(lp), np.ones_like(lp)):
        for distance in (0.0, 1e4, -1e4):
            inputs = tensors(x | {"advantages": advantages, "logprobs": lp - distance}, torch.float32)
            metrics = get_loss(name).diagnostics(torch.from_numpy(lp).float(), inputs)
            assert all(math.isfinite(value) for value in metrics.values())
            assert all(key.count(":") == 1 and key.startswith(name) for key in metrics)
            assert advantages.any() or set(metrics.values()) <= {0.0}


# --- names and configs ------------------------------------------------------------------------------------------------


def test_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown loss 'ppo2'; known: cispo, cross_entropy, dro, gspo, .*, ppo"):
        get_loss("ppo2")


@pytest.mark.parametrize("name", ["stable_reinforce", "custom"])
def test_losses_of_the_protocol_that_we_do_not_offer(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}' is not implemented: "):
        get_loss(name)


def test_config_defaults() -> None:
    assert {name: resolve_config(loss, {}) for name, loss in TOKEN_LOSSES.items()} == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
        "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    }


def test_config_overrides_defaults_and_leaves_them_alone() -> None:
    resolved = resolve_config(get_loss("ppo"), {"clip_high_threshold": 2})
    assert resolved == {"clip_low_threshold": 0.8, "clip_high_threshold": 2.0}
    assert type(resolved["clip_high_threshold"]) is float
    assert get_loss("ppo").config["clip_high_threshold"] == 1.2
    assert resolve_config(get_loss("dro"), {"beta": np.float32(0.5)}) == {"beta": 0.5}


def test_unknown_config_key_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="loss ppo 'epsilon'; known: clip_high_threshold, clip_low_threshold"):
        resolve_config(get_loss("ppo"), {"epsilon": 0.2})
    with pytest.raises(UnknownNameError, match="loss cross_entropy 'beta'; known: none"):
        resolve_config(get_loss("cross_entropy"), {"beta": 0.2})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.1", None, 1j, [0.1], 10**400, -1.0])
def test_config_values_are_finite_numbers_and_beta_is_not_negative(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"loss_config\.beta: got "):
        resolve_config(get_loss("dro"), {"beta": value})


@pytest.mark.parametrize(
    "config", [{"clip_low_threshold": 2.0, "clip_high_threshold": 1.5}, {"clip_high_threshold": 0.5}]
)
def test_clip_bounds_are_in_order(config: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match=r"loss_config\.clip_low_threshold: got .* at most clip_high_threshold"):
        resolve_config(get_loss("ppo"), config)


# --- the package ------------------------------------------------------------------------------------------------------


def test_public_names_are_present() -> None:
    assert len(twinkle.loss.__all__) == len(set(twinkle.loss.__all__))
    assert all(hasattr(twinkle.loss, name) for name in twinkle.loss.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twinkle.loss.nothing  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, twinkle.loss; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
