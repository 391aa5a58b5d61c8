"""AdamW on one adapter: equal to torch's for the same gradients and any hyper-parameters; no other adapter changes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.models.reference import (
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    toy_llama,
    used_parameters,
)
from twinkle.errors import InvalidInputError
from twinkle.model import AdamParams, AdapterSnapshot, LoraSpec, Trainer, TrainItem
from twinkle.model.adapters.optimizer import gradient_norm

pytestmark = pytest.mark.matrix

MakeTrainer = Callable[..., Trainer]
BASE = toy_llama()
HUGE = pytest.param(10**400, id="10**400")  # an integer too large for a float


def train(trainer: Trainer, adapter_id: str = "a", seed: int = 0) -> None:
    trainer.forward_backward([TrainItem(adapter_id, [random_datum(BASE, "cross_entropy", 20, seed)])])


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    trainer = make_trainer(BASE)
    trainer.create_adapter("a", LoraSpec(5, seed=0, train_unembed=True))
    return trainer


def assert_equal(left: AdapterSnapshot, right: AdapterSnapshot) -> None:
    for name, value in vars(right).items():
        np.testing.assert_array_equal(getattr(left, name), value, err_msg=name)


class TorchAdamW:
    """torch.optim.AdamW over the same tensors, with the gradients that the trainer reports."""

    def __init__(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self.parameters = {name: torch.nn.Parameter(torch.from_numpy(w.copy())) for name, w in weights.items()}
        self.optimizer = torch.optim.AdamW(self.parameters.values())

    def step(self, gradients: Mapping[str, NDArray[np.float32]], params: AdamParams) -> float:
        for name, parameter in self.parameters.items():
            parameter.grad = torch.from_numpy(gradients[name].copy())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), params.grad_clip_norm or math.inf)
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self.optimizer.step()
        return norm.item()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: parameter.detach().numpy() for name, parameter in self.parameters.items()}


SCHEDULES: Mapping[str, Callable[[int], AdamParams]] = {
    "defaults": lambda step: AdamParams(),
    "cookbook": lambda step: AdamParams(learning_rate=4e-4, eps=1e-8),
    "weight decay": lambda step: AdamParams(learning_rate=1e-2, weight_decay=0.3),
    "clipped": lambda step: AdamParams(learning_rate=1e-3, grad_clip_norm=0.5),
    "hardly clipped": lambda step: AdamParams(learning_rate=1e-3, grad_clip_norm=1e6),
    "no momentum": lambda step: AdamParams(learning_rate=1e-3, beta1=0.0, beta2=0.0, eps=1e-3),
    "large eps": lambda step: AdamParams(learning_rate=1e-2, eps=10.0),
    "all change": lambda step: AdamParams(
        learning_rate=1e-3 / (1 + step),
        beta1=0.9 - 0.1 * step,
        beta2=0.999 - 0.05 * step,
        eps=10.0 ** (-2 * step),
        weight_decay=0.1 * step,
        grad_clip_norm=[0.0, 1.0, 0.1, 100.0, 0.0, 3.0][step],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_equal_torch_given_the_same_gradients(name: str, trainer: Trainer) -> None:
    """Holds at any eps: the gradients are equal bit by bit, so no difference is magnified.

    See the top of test_numerics.py.
    """
    theirs = TorchAdamW(trainer.weights("a"))
    for step in range(6):
        train(trainer, seed=step)
        params = SCHEDULES[name](step)
        norm = theirs.step(trainer.gradients("a"), params)
        assert_numbers_close(trainer.optim_step("a", params)["unclipped_grad_l2:mean"], norm)
        assert_tensors_close(trainer.weights("a"), theirs.weights(), tolerance=1e-6)
        assert trainer.step_count("a") == step + 1


def test_the_next_forward_pass_sees_the_step(trainer: Trainer) -> None:
    item = TrainItem("a", [random_datum(BASE, "cross_entropy", 20, 0)])
    (before,) = trainer.forward_backward([item])
    trainer.optim_step("a", AdamParams(learning_rate=1e-3))
    (after,) = trainer.forward([item])
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]


@pytest.mark.parametrize("trained_before", [False, True])
def test_without_a_gradient_nothing_changes(trained_before: bool, trainer: Trainer) -> None:
    """Weight decay and momentum change nothing either, and the step does not count."""
    if trained_before:
        train(trainer)
        trainer.optim_step("a", AdamParams(learning_rate=1e-2))
    before = trainer.snapshot("a")
    metrics = trainer.optim_step("a", AdamParams(learning_rate=0.1, weight_decay=0.5, grad_clip_norm=1.0))
    assert metrics == {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
    assert_equal(trainer.snapshot("a"), before)


def test_a_step_uses_the_gradient_up(trainer: Trainer) -> None:
    train(trainer)
    assert trainer.gradients("a") != {}
    trainer.optim_step("a", AdamParams(learning_rate=1e-2))
    assert trainer.gradients("a") == {}
    before = trainer.snapshot("a")
    trainer.optim_step("a", AdamParams(learning_rate=1e-2))
    assert_equal(trainer.snapshot("a"), before)


def test_zero_grad_drops_the_window_and_nothing_else(trainer: Trainer) -> None:
    train(trainer)
    trainer.optim_step("a", AdamParams(learning_rate=1e-2))
    before = trainer.snapshot("a")
    train(trainer, seed=1)
    trainer.zero_grad("a")
    assert trainer.gradients("a") == {}
    assert_equal(replace(trainer.snapshot("a"), passes=before.passes), before)  # the pass itself counts
    trainer.zero_grad("a")  # a second call is allowed
    train(trainer, seed=2)
    gradients = trainer.gradients("a")
    trainer.zero_grad("a")
    train(trainer, seed=2)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(trainer.gradients("a")[name], gradient)


def test_a_zero_gradient_is_a_gradient(trainer: Trainer) -> None:
    """A request whose weights are all 0 opens a window: the step decays weights and counts, as in torch."""
    theirs = TorchAdamW(trainer.weights("a"))
    params = AdamParams(learning_rate=0.1, weight_decay=0.5)
    datum = replace(random_datum(BASE, "cross_entropy", 9, 0), weights=np.zeros(9, np.float32))
    trainer.forward_backward([TrainItem("a", [datum])])
    theirs.step(trainer.gradients("a"), params)
    assert trainer.optim_step("a", params) == {"unclipped_grad_l2:mean": 0.0}
    assert trainer.step_count("a") == 1
    assert_tensors_close(trainer.weights("a"), theirs.weights(), tolerance=1e-6)


def test_a_step_touches_one_adapter(make_trainer: MakeTrainer) -> None:
    """Neighbours in the same stack stay unchanged, including one with its own gradient."""
    trainer = make_trainer(BASE)
    for number, adapter_id in enumerate("abc"):
        trainer.create_adapter(adapter_id, LoraSpec(8, seed=number))
        train(trainer, adapter_id)
    trainer.zero_grad("c")
    before = trainer.snapshot("a"), trainer.snapshot("c")
    items = [TrainItem(adapter_id, [random_datum(BASE, "cross_entropy", 8, 3)]) for adapter_id in "abc"]
    scored = trainer.forward(items)
    trainer.optim_step("b", AdamParams(learning_rate=0.1, weight_decay=0.1))
    assert_equal(trainer.snapshot("a"), before[0])
    assert_equal(trainer.snapshot("c"), before[1])
    again = trainer.forward(items)
    assert [again[i].metrics == scored[i].metrics for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("rank", [1, 5, 9, 100])
def test_the_padding_of_a_rank_stays_zero(rank: int, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(BASE)
    trainer.create_adapter("a", LoraSpec(rank, seed=0, train_unembed=True))
    for step in range(3):
        train(trainer, seed=step)
        assert not trainer.snapshot("a").gradient[~used_parameters(trainer, "a")].any()
        trainer.optim_step("a", AdamParams(learning_rate=0.01, weight_decay=0.1))
    snapshot, padding = trainer.snapshot("a"), ~used_parameters(trainer, "a")
    assert padding.any()
    for row in (snapshot.weights, snapshot.exp_avg, snapshot.exp_avg_sq):
        assert not row[padding].any()
        assert row[~padding].any()


def test_a_learning_rate_of_zero_moves_the_moments_only(trainer: Trainer) -> None:
    train(trainer)
    before = trainer.snapshot("a")
    trainer.optim_step("a", AdamParams(learning_rate=0.0, weight_decay=0.5))
    after = trainer.snapshot("a")
    np.testing.assert_array_equal(after.weights, before.weights)
    assert after.exp_avg.any()
    assert after.step == 1


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, "0.1", None, True, HUGE])
def test_values_that_cannot_be(field: str, value: object, trainer: Trainer) -> None:
    train(trainer)
    before = trainer.snapshot("a")
    with pytest.raises(InvalidInputError, match=f"^{field}: got .*allowed: "):
        trainer.optim_step("a", replace(AdamParams(), **{field: value}))
    assert_equal(trainer.snapshot("a"), before)


@pytest.mark.parametrize(("field", "value"), [("beta1", 1.0), ("beta2", 1.0), ("eps", 0.0)])
def test_bounds(field: str, value: float, trainer: Trainer) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: got {value}, allowed: "):
        trainer.optim_step("a", replace(AdamParams(), **{field: value}))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [1, 511, 512, 513, 1_000_003])
def test_norms_of_any_length(size: int, norm_type: float) -> None:
    gradient_P = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-3
    wanted = np.linalg.norm(gradient_P.numpy().astype(np.float64), norm_type)
    assert gradient_norm(gradient_P, norm_type) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_the_norm_shows_a_bad_value_anywhere(place: int, bad: float) -> None:
    gradient_P = torch.ones(10_000)
    gradient_P[place] = bad
    assert not math.isfinite(gradient_norm(gradient_P))
