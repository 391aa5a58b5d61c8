"""Each loss through the trainer: its value equals the formula, its gradient the slope of the formula.

The formulas are written in numpy over the log-probabilities that the trainer returned; ``fixed`` is their value inside
stopgrad.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.models.reference import (
    Reference,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    toy_llama,
    used_parameters,
    with_random_weights,
)
from twinkle.loss import TOKEN_LOSSES
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.trainer.call import TrainerCall

pytestmark = pytest.mark.matrix

MakeTrainer = Callable[..., Trainer]
Array = NDArray[np.float64]
BASE = toy_llama()


# --- formulas ---------------------------------------------------------------------------------------------------------


def cross_entropy(lp: Array, fixed: Array, x: Mapping[str, Array]) -> Array:
    return -x["weights"] * lp


def importance_sampling(lp: Array, fixed: Array, x: Mapping[str, Array]) -> Array:
    return -np.exp(lp - x["logprobs"]) * x["advantages"]


def ppo(lp: Array, fixed: Array, x: Mapping[str, Array]) -> Array:
    ratio, a = np.exp(lp - x["logprobs"]), x["advantages"]
    return -np.minimum(ratio * a, np.clip(ratio, x["clip_low_threshold"], x["clip_high_threshold"]) * a)


def cispo(lp: Array, fixed: Array, x: Mapping[str, Array]) -> Array:
    clipped = np.clip(np.exp(fixed - x["logprobs"]), x["clip_low_threshold"], x["clip_high_threshold"])
    return -clipped * lp * x["advantages"]


def dro(lp: Array, fixed: Array, x: Mapping[str, Array]) -> Array:
    return -(lp * x["advantages"] - 0.5 * x["beta"] * (lp - x["logprobs"]) ** 2)


def gspo(lp: Array, fixed: Array, x: Mapping[str, Array]) -> Array:
    mean = (fixed - x["logprobs"])[x["sequence_ratio_mask"] != 0].mean()
    ratio, a = np.exp(mean + lp - fixed), x["advantages"]
    return -np.minimum(ratio * a, np.clip(ratio, x["clip_low_threshold"], x["clip_high_threshold"]) * a)


FORMULAS: Mapping[str, Callable[[Array, Array, Mapping[str, Array]], Array]] = {
    "cispo": cispo,
    "cross_entropy": cross_entropy,
    "dro": dro,
    "gspo": gspo,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
}
DEFAULTS = {
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "cross_entropy": {},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
CONFIGS = {
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3},
    "cross_entropy": {},
    "dro": {"beta": 0.4},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.1},
}


def value(item: TrainItem, logprobs: list[NDArray[np.float32]], fixed: list[NDArray[np.float32]]) -> float:
    """Return the loss of a request, summed over its sequences."""
    total = 0.0
    for datum, lp, at in zip(item.data, logprobs, fixed, strict=True):
        x = {**DEFAULTS[item.loss], **item.loss_config, **datum.extras, "weights": datum.weights}
        if datum.weights is None:
            x["weights"] = 1.0
        x = {key: np.asarray(each, np.float64) for key, each in x.items()}
        total += FORMULAS[item.loss](lp.astype(np.float64), at.astype(np.float64), x).sum()
    return float(total)


def request(loss: str, adapter_id: str = "a", seed: int = 0, lengths: tuple[int, ...] = (13, 21)) -> TrainItem:
    data = [random_datum(BASE, loss, length, seed=100 * seed + length) for length in lengths]
    return TrainItem(adapter_id, data, loss)


def ready_trainer(make_trainer: MakeTrainer, *adapters: str, tokens: int | None = None) -> Trainer:
    trainer = make_trainer(BASE, max_tokens_per_batch=tokens)
    for number, adapter_id in enumerate(adapters):
        trainer.create_adapter(adapter_id, LoraSpec(8, alpha=8, seed=number, train_unembed=True))
        trainer.restore(adapter_id, with_random_weights(trainer, adapter_id, seed=number, size=0.02))
    return trainer


def test_every_loss_has_a_formula_here() -> None:
    assert sorted(FORMULAS) == sorted(TOKEN_LOSSES)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 25])
def test_losses_of_one_call_equal_their_formulas(tokens: int | None, make_trainer: MakeTrainer) -> None:
    """All losses in one call, each with its defaults and with a configuration: each request uses its own."""
    trainer = ready_trainer(make_trainer, *(f"{loss} {kind}" for loss in FORMULAS for kind in "dc"), tokens=tokens)
    items = [request(loss, f"{loss} d", seed=1) for loss in FORMULAS]
    items += [replace(request(loss, f"{loss} c", seed=2), loss_config=CONFIGS[loss]) for loss in FORMULAS]
    for results in (trainer.forward(items), trainer.forward_backward(items)):
        for item, result in zip(items, results, strict=True):
            assert isinstance(result, TrainResult)
            assert_numbers_close(result.metrics["loss:sum"], value(item, result.logprobs, result.logprobs))
            assert all(name.count(":") == 1 for name in result.metrics)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_clip_bounds_that_come_with_the_tokens(loss: str, make_trainer: MakeTrainer) -> None:
    """Clip bounds of the tokens override the configuration for each datum: the second has none, the third only one."""
    trainer = ready_trainer(make_trainer, "a")
    configured = replace(request(loss, lengths=(13, 21, 17)), loss_config=CONFIGS[loss])
    rng = np.random.default_rng(0)
    low, high = rng.uniform(0.6, 1.0, 17), rng.uniform(1.0, 1.4, 17)
    first, second, third = configured.data
    first = replace(first, extras={**first.extras, "clip_low_threshold": low[:13], "clip_high_threshold": high[:13]})
    third = replace(third, extras={**third.extras, "clip_high_threshold": high})
    item = replace(configured, data=[first, second, third])
    (result,) = trainer.forward([item])
    expected = value(item, result.logprobs, result.logprobs)
    assert_numbers_close(result.metrics["loss:sum"], expected)
    assert value(configured, result.logprobs, result.logprobs) != pytest.approx(expected, rel=1e-4)


def test_cross_entropy_without_weights_and_with_several_targets(make_trainer: MakeTrainer) -> None:
    """K may differ between the datums of one request and between the requests of one call."""
    trainer = ready_trainer(make_trainer, "a", "b")
    data = [
        random_datum(BASE, "cross_entropy", length, seed=length, width=k) for length, k in ((9, 3), (14, 0), (5, 1))
    ]
    items = [
        TrainItem("a", data),
        TrainItem("b", [replace(datum, weights=None) for datum in data]),
        request("ppo", "a", seed=3),
        TrainItem("b", [random_datum(BASE, "cross_entropy", 8, seed=8, width=5)]),
    ]
    for results in (trainer.forward(items), trainer.forward_backward(items)):
        for item, result in zip(items, results, strict=True):
            assert [lp.shape for lp in result.logprobs] == [datum.targets.shape for datum in item.data]
            assert_numbers_close(result.metrics["loss:sum"], value(item, result.logprobs, result.logprobs))


@pytest.mark.parametrize("loss", FORMULAS)
def test_metrics_do_not_depend_on_company_or_micro_batches(loss: str, make_trainer: MakeTrainer) -> None:
    item = request(loss, lengths=(6, 19, 11))
    (alone,) = ready_trainer(make_trainer, "a", "b").forward_backward([item])
    others = [request(other, "b", seed=4) for other in FORMULAS]
    for tokens in (None, 20, 6):
        result = ready_trainer(make_trainer, "a", "b", tokens=tokens).forward_backward([*others, item])[-1]
        assert result.metrics.keys() == alone.metrics.keys()
        assert_numbers_close(list(result.metrics.values()), list(alone.metrics.values()))


# --- slopes -----------------------------------------------------------------------------------------------------------

STEP = 4e-3


@pytest.mark.parametrize("part", ["A", "B", "random"])
@pytest.mark.parametrize("loss", FORMULAS)
def test_gradients_equal_finite_differences(loss: str, part: str, make_trainer: MakeTrainer) -> None:
    """Compare with the slope of the formula along a direction in weight space, from four points.

    The stopgrad parts stay at the middle point. The directions are the gradient itself, in A or in B, where a wrong
    factor shows, and a random one.
    """
    trainer = ready_trainer(make_trainer, "a")
    item = replace(request(loss, seed=5), loss_config=CONFIGS[loss])
    (middle,) = trainer.forward_backward([item])
    snapshot, gradient = trainer.snapshot("a"), trainer.snapshot("a").gradient.astype(np.float64)
    inputs = trainer._pool.get("a").layout.a_size
    direction = {
        "A": np.where(np.arange(gradient.size) < inputs, gradient, 0),
        "B": np.where(np.arange(gradient.size) < inputs, 0, gradient),
        "random": gradient / np.linalg.norm(gradient)
        + np.random.default_rng(0).normal(size=gradient.size) * used_parameters(trainer, "a") / gradient.size**0.5,
    }[part]
    direction /= np.linalg.norm(direction)

    def at(distance: float) -> float:
        moved = (snapshot.weights + distance * direction).astype(np.float32)
        trainer.restore("a", replace(snapshot, weights=moved))
        (result,) = trainer.forward([item])
        return value(item, result.logprobs, middle.logprobs)

    numeric = (8 * (at(STEP) - at(-STEP)) - (at(2 * STEP) - at(-2 * STEP))) / (12 * STEP)
    assert abs(gradient @ direction) > 0.1
    assert numeric == pytest.approx(gradient @ direction, rel=1e-3)


@pytest.mark.parametrize("loss", FORMULAS)
def test_gradients_follow_each_tenants_own_configuration(loss: str, make_trainer: MakeTrainer) -> None:
    """Requests with the same loss are evaluated together; each tenant keeps its own configuration and sequences."""
    items = [
        request(loss, "a", seed=1),
        replace(request(loss, "b", seed=1), loss_config=CONFIGS[loss]),
        request(loss, "c", seed=2, lengths=(21, 5)),
    ]
    together = ready_trainer(make_trainer, "a", "b", "c")
    together.forward_backward(items)
    alone = ready_trainer(make_trainer, "a", "b", "c")
    for item in items:
        alone.forward_backward([item])
        assert_tensors_close(together.gradients(item.adapter_id), alone.gradients(item.adapter_id))


@pytest.mark.parametrize("width", [0, 3])
def test_a_loss_computed_by_the_client(width: int, make_trainer: MakeTrainer) -> None:
    """As Tinker's custom losses do it: score, differentiate by log-probabilities, send −gradient as weights."""
    trainer = ready_trainer(make_trainer, "a")
    data = [random_datum(BASE, "cross_entropy", length, seed=length, width=width) for length in (12, 7)]
    (scored,) = trainer.forward([TrainItem("a", data)])

    def custom(logprobs: list[torch.Tensor]) -> torch.Tensor:
        return sum((lp**2).sum() + lp.exp().sum() for lp in logprobs) + logprobs[0].mean() * logprobs[1].mean()

    leaves = [torch.from_numpy(lp).requires_grad_() for lp in scored.logprobs]
    slopes = torch.autograd.grad(custom(leaves), leaves)
    weighted = [replace(datum, weights=-slope.numpy()) for datum, slope in zip(data, slopes, strict=True)]
    trainer.forward_backward([TrainItem("a", weighted)])

    reference = Reference(BASE, trainer.spec("a"), trainer.weights("a"))
    custom([target_logprobs(reference.model, datum) for datum in data]).backward()
    assert_tensors_close(trainer.gradients("a"), reference.gradients())


def test_a_token_without_weight_or_advantage_has_no_gradient(make_trainer: MakeTrainer) -> None:
    trainer = ready_trainer(make_trainer, "a")
    length = 10
    tokens, targets = np.arange(length), np.arange(length) + 1
    zeros = np.zeros(length, np.float32)
    extras = {"logprobs": zeros, "advantages": zeros, "sequence_ratio_mask": zeros}
    for loss in FORMULAS:
        if loss != "dro":  # its quadratic term has no mask
            (result,) = trainer.forward_backward([TrainItem("a", [Datum(tokens, targets, zeros, extras)], loss)])
            assert result.metrics["loss:sum"] == 0
    assert not any(gradient.any() for gradient in trainer.gradients("a").values())


@pytest.mark.parametrize(
    ("logprob", "loss", "message"),
    [
        (-np.inf, 1.0, "a log-probability of token 2 of data[1] is NaN or infinite: no gradient was kept"),
        (np.nan, np.nan, "loss 'cross_entropy' is nan: no gradient was kept"),
    ],
)
def test_what_is_not_finite_is_named(logprob: float, loss: float, message: str) -> None:
    """A loss that ignores a target is finite even where the target's log-probability is not."""
    good, bad = np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32)
    bad[2, 0] = logprob
    item = SimpleNamespace(loss=SimpleNamespace(name="cross_entropy"))
    request = SimpleNamespace(ordered_logprobs=[good, bad], metrics={"loss:sum": loss}, evaluation=None, item=item)
    failed: list[tuple[int, Exception]] = []
    TrainerCall._finish(SimpleNamespace(_fail=lambda *given: failed.append(given)), 3, request)  # type: ignore[arg-type]
    ((index, error),) = failed
    assert (index, str(error)) == (3, message)
