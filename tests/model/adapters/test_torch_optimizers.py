"""The optimizers other than Adam: for the same gradients each equals torch.optim's, alone, in company and restored."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models.reference import assert_tensors_close, random_datum, toy_llama, with_random_weights
from tests.support.models.tiny_models import tiny_model
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainItem
from twinkle.model.adapters.optimizer import OPTIMIZERS
from twinkle.model.types import EXPERT_FORMS

MakeTrainer = Callable[..., Trainer]
BASE = toy_llama()
SPEC = LoraSpec(5, seed=0, rank_pattern={"q_proj": 3, "down_proj": 11})  # ranks that their buckets pad to 8, 4 and 16

# The settings of each case: with the parts of an optimizer's state that its defaults leave out.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ASGD": ("ASGD", {"lr": 0.05, "t0": 1.0, "weight_decay": 0.1}),
    "Adadelta": ("Adadelta", {"lr": 1.0, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    "Adamax": ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    "Muon": ("Muon", {"lr": 0.02, "weight_decay": 0.1}),
    "Muon without Nesterov": ("Muon", {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "NAdam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ("RAdam", {"lr": 0.01, "betas": (0.5, 0.6)}),
    "RMSprop": ("RMSprop", {"lr": 0.01}),
    "RMSprop with momentum": ("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    "RMSprop centered": ("RMSprop", {"lr": 0.01, "centered": True}),
    "SGD": ("SGD", {"lr": 0.5}),
    "SGD with momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    "SGD with Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@pytest.fixture(scope="module")
def trainer(make_trainer: MakeTrainer) -> Trainer:
    return make_trainer(BASE)


def add_gradient(trainer: Trainer, *adapters: str, seed: int = 0) -> None:
    trainer.forward_backward([TrainItem(each, [random_datum(BASE, "cross_entropy", 20, seed)]) for each in adapters])


class Torch:
    """A torch optimizer over copies of an adapter's weights."""

    def __init__(self, trainer: Trainer, adapter_id: str, name: str, settings: Mapping[str, Any]) -> None:
        weights = trainer.weights(adapter_id)
        self.parameters = {key: torch.nn.Parameter(torch.from_numpy(each.copy())) for key, each in weights.items()}
        self.optimizer = getattr(torch.optim, name)(self.parameters.values(), **settings)

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = torch.from_numpy(gradients[name].copy())
        self.optimizer.step()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: parameter.detach().numpy() for name, parameter in self.parameters.items()}


@pytest.fixture
def adapter(trainer: Trainer) -> str:
    for each in trainer.adapter_ids():
        trainer.remove_adapter(each)
    trainer.create_adapter("a", SPEC)
    with_random_weights(trainer, "a")  # with B = 0 the gradient of A would be 0
    return "a"


def test_every_optimizer_has_a_case():
    assert {name for name, _ in CASES.values()} == set(OPTIMIZERS)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch_and_go_on_after_a_snapshot(trainer, adapter, case, tmp_path):
    """Three steps; then a snapshot, a checkpoint and the adapter itself all take the same fourth step."""
    name, settings = CASES[case]
    theirs = Torch(trainer, adapter, name, settings)
    for seed in range(3):
        add_gradient(trainer, adapter, seed=seed)
        gradients = trainer.gradients(adapter)
        trainer.optimizer_step(adapter, name, settings)
        theirs.step(gradients)
    # Muon computes in bfloat16: a difference in the last bit of a float32 can become one of 1/256 there.
    assert_tensors_close(trainer.weights(adapter), theirs.weights(), 2e-3 if name == "Muon" else 1e-5)
    trainer.restore("restored", trainer.snapshot(adapter))
    trainer.save(adapter, tmp_path / "saved")
    trainer.create_adapter_from_checkpoint("loaded", tmp_path / "saved")
    for each in (adapter, "restored", "loaded"):
        add_gradient(trainer, each, seed=7)
        trainer.optimizer_step(each, name, settings)
    for each in ("restored", "loaded"):
        for key, value in trainer.weights(adapter).items():
            np.testing.assert_array_equal(trainer.weights(each)[key], value, err_msg=f"{each} {key}")


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_company_does_not_matter(trainer, adapter, name):
    """An adapter trained in one batch with an adapter of another optimizer has the weights of one trained alone."""
    trainer.create_adapter("beside", LoraSpec(5, seed=1))
    trainer.restore("alone", trainer.snapshot(adapter))
    settings = {"lr": 0.05, "weight_decay": 0.0, "momentum": 0.9}
    for seed in range(2):
        add_gradient(trainer, adapter, "beside", seed=seed)
        add_gradient(trainer, "alone", seed=seed)
        trainer.optim_step("beside", AdamParams())
        for each in (adapter, "alone"):
            trainer.optimizer_step(each, name, settings)
    assert_tensors_close(trainer.weights(adapter), trainer.weights("alone"), 2e-3 if name == "Muon" else 1e-5)


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_muon_on_experts(make_trainer: MakeTrainer, form: str) -> None:
    """In Tinker's form each expert has matrices of its own; PEFT's parameters are matrices of all experts."""
    base = tiny_model("qwen3_moe")
    trainer = make_trainer(base)
    trainer.create_adapter("a", LoraSpec(5, seed=0, experts=form, rank_pattern={"down_proj": 3, "w2": 3}))
    trainer.restore("a", with_random_weights(trainer, "a"))
    settings = {"lr": 0.02, "weight_decay": 0.1}
    apart = {
        f"{name}.{number}": matrix.copy()
        for name, each in trainer.weights("a").items()
        for number, matrix in enumerate(each.reshape(-1, *each.shape[-2:]))
    }
    parameters = {name: torch.nn.Parameter(torch.from_numpy(each)) for name, each in apart.items()}
    theirs = torch.optim.Muon(parameters.values(), **settings)
    for seed in range(2):
        trainer.forward_backward([TrainItem("a", [random_datum(base, "cross_entropy", 20, seed)])])
        for name, each in trainer.gradients("a").items():
            for number, matrix in enumerate(each.reshape(-1, *each.shape[-2:])):
                parameters[f"{name}.{number}"].grad = torch.from_numpy(matrix.copy())
        trainer.optimizer_step("a", "Muon", settings)
        theirs.step()
    for name, each in trainer.weights("a").items():
        for number, matrix in enumerate(each.reshape(-1, *each.shape[-2:])):
            expected = parameters[f"{name}.{number}"].detach().numpy()
            assert_tensors_close({name: matrix}, {name: expected}, 2e-3)


def test_another_optimizer_starts_from_zero(trainer, adapter):
    """After steps of Adam, SGD does not take Adam's moments for its momentum, nor the reverse."""
    for switch in (False, True):
        add_gradient(trainer, adapter)
        if switch:
            trainer.optim_step(adapter, AdamParams())
        else:
            trainer.optimizer_step(adapter, "SGD", {"lr": 0.1, "momentum": 0.9})
    fresh = Torch(trainer, adapter, "SGD", {"lr": 0.1, "momentum": 0.9})
    add_gradient(trainer, adapter, seed=1)
    gradients = trainer.gradients(adapter)
    trainer.optimizer_step(adapter, "SGD", {"lr": 0.1, "momentum": 0.9})
    fresh.step(gradients)
    assert_tensors_close(trainer.weights(adapter), fresh.weights(), 1e-5)
    assert trainer.step_count(adapter) == 1


def test_refusals_change_nothing(trainer, adapter, tmp_path: Path):
    """Some settings only fail in a step, and some only if there is state already: neither leaves a trace."""
    add_gradient(trainer, adapter)
    trainer.optimizer_step(adapter, "SGD", {"lr": 0.1, "momentum": 0.9})
    add_gradient(trainer, adapter)
    before = trainer.snapshot(adapter)
    for name, settings, error, text in [
        ("LBFGS", {"lr": 0.1}, UnknownNameError, "SGD"),
        ("SGD", {"lr": -1.0}, InvalidInputError, "settings of SGD: got .*-1.0.*learning rate"),
        ("SGD", {"lr": 1e300, "momentum": 0.9}, InvalidInputError, "1e\\+300.*overflow"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": -1e308}, InvalidInputError, "overflow"),
        ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True}, UnsupportedError, "one of them"),
    ]:
        with pytest.raises(error, match=text):
            trainer.optimizer_step(adapter, name, settings)
    after = trainer.snapshot(adapter)
    for name in ("weights", "exp_avg", "exp_avg_sq", "gradient"):
        np.testing.assert_array_equal(vars(after)[name], vars(before)[name])
    assert (after.optimizer, after.step) == (before.optimizer, before.step)
