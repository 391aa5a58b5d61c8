"""Adapters on experts: alone, in company, and the plain model with W + B A written out for each expert are equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import (
    TOLERANCE,
    Arrays,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    tolerance_of,
    with_random_weights,
)
from tests.support.models.sampling import prompt, request, run, toy_sampler
from tests.support.models.tiny_models import EXPERT_FAMILIES, the_result, tiny_model, tiny_trainer
from tests.support.thorough import by_default
from twinkle.errors import InvalidInputError
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem
from twinkle.model.decoder.architecture import read_architecture

pytestmark = pytest.mark.matrix

STEPS = 3


@dataclass(frozen=True)
class Tenant:
    spec: LoraSpec
    loss: str
    lengths: tuple[int, ...]
    config: Mapping[str, float] = field(default_factory=dict)


TENANTS: Mapping[str, Tenant] = {
    "rank 1": Tenant(LoraSpec(1, alpha=2, seed=1), "cross_entropy", (5, 33)),
    "rank 5": Tenant(LoraSpec(5, alpha=7.5, seed=2), "importance_sampling", (17,)),
    "rank 8": Tenant(LoraSpec(8, alpha=16, seed=3), "ppo", (9, 9, 24)),
    "attention": Tenant(LoraSpec(16, alpha=32, seed=4, train_mlp=False), "cispo", (40,)),
    "experts": Tenant(LoraSpec(16, alpha=32, seed=5, train_attn=False), "dro", (12, 12), {"beta": 0.2}),
    "with head": Tenant(LoraSpec(32, alpha=32, seed=6, train_unembed=True), "gspo", (21, 8, 30)),
    "rank 40": Tenant(LoraSpec(40, alpha=50, seed=7), "cross_entropy", (11,)),
    "same stack": Tenant(LoraSpec(7, alpha=3, seed=8), "cross_entropy", (9, 1)),
}


@cache
def base_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


def add(trainer: Trainer, name: str) -> None:
    trainer.create_adapter(name, TENANTS[name].spec)
    trainer.restore(name, with_random_weights(trainer, name, seed=len(name)))


def item(family: str, name: str, step: int) -> TrainItem:
    tenant, number = TENANTS[name], list(TENANTS).index(name)
    data = [
        random_datum(base_model(family), tenant.loss, length, seed=1000 * step + 10 * number + index)
        for index, length in enumerate(tenant.lengths)
    ]
    return TrainItem(name, data, tenant.loss, tenant.config)


def adam(step: int) -> AdamParams:
    """Return parameters with an eps that keeps rounding errors of gradients near zero small."""
    return AdamParams(learning_rate=3e-3, eps=0.1 + 0.05 * step, weight_decay=0.05 * step, grad_clip_norm=2.0 * step)


@dataclass(frozen=True)
class Step:
    logprobs: Sequence[np.ndarray]
    loss: float
    gradients: Arrays
    norm: float
    weights: Arrays  # after the step


def train(trainer: Trainer, family: str, names: Sequence[str]) -> dict[str, list[Step]]:
    history: dict[str, list[Step]] = {name: [] for name in names}
    for step in range(STEPS):
        for name, outcome in zip(names, trainer.forward_backward([item(family, n, step) for n in names]), strict=True):
            result, gradients = the_result(outcome), trainer.gradients(name)
            norm = trainer.optim_step(name, adam(step))["unclipped_grad_l2:mean"]
            done = Step(result.logprobs, result.metrics["loss:sum"], gradients, norm, trainer.weights(name))
            history[name].append(done)
    return history


@cache
def company(family: str) -> dict[str, list[Step]]:
    """Return the steps of all tenants, who share every batch."""
    trainer = tiny_trainer(base_model(family))
    for name in TENANTS:
        add(trainer, name)
    return train(trainer, family, list(TENANTS))


def assert_same(ours: Sequence[Step], theirs: Sequence[Step], tolerance: float = TOLERANCE) -> None:
    for left, right in zip(ours, theirs, strict=True):
        for mine, other in zip(left.logprobs, right.logprobs, strict=True):
            assert_numbers_close(mine, other, tolerance)
        assert_numbers_close(left.loss, right.loss, tolerance)
        assert_tensors_close(left.gradients, right.gradients, tolerance)
        assert_numbers_close(left.norm, right.norm, tolerance)
        assert_tensors_close(left.weights, right.weights)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_in_company_equals_the_plain_formula(family: str) -> None:
    for name, tenant in TENANTS.items():
        trainer = tiny_trainer(base_model(family))
        add(trainer, name)
        plain, steps = ExpertsReference(base_model(family), tenant.spec, trainer.weights(name)), []
        for step in range(STEPS):
            result = plain.forward_backward(item(family, name, step))
            gradients = plain.gradients()
            norm = plain.optim_step(adam(step))
            steps.append(Step(result.logprobs, result.loss, gradients, norm, plain.weights()))
        assert_same(company(family)[name], steps, tolerance_of(family))


@pytest.mark.parametrize("family", by_default("qwen3_moe", "gpt_oss", of=EXPERT_FAMILIES))
def test_in_company_equals_alone(family: str) -> None:
    for name in ("rank 5", "experts"):
        trainer = tiny_trainer(base_model(family))
        add(trainer, name)
        assert_same(company(family)[name], train(trainer, family, [name])[name], tolerance_of(family))


def test_cut_into_micro_batches_and_recomputed() -> None:
    """Sequences in passes of their own, and layers that the backward pass computes again, give the same."""
    trainer = tiny_trainer(base_model("qwen3_moe"), max_tokens_per_batch=40)
    for name in TENANTS:
        add(trainer, name)
    for name, steps in train(trainer, "qwen3_moe", list(TENANTS)).items():
        assert_same(steps, company("qwen3_moe")[name])


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_the_sampler_computes_what_the_trainer_does(family: str) -> None:
    trainer = tiny_trainer(base_model(family))
    names = ["rank 5", "attention", "experts", "with head"]
    for name in names:
        add(trainer, name)
    sampler, tokens = toy_sampler(trainer), prompt(23)
    results = run(sampler, [request(str(name), name, tokens, max_tokens=6, temperature=0.0) for name in [None, *names]])
    for name in names:
        (sequence,) = results[name].sequences
        whole = np.concatenate([tokens, sequence.tokens])
        scored = the_result(trainer.forward([TrainItem(name, [Datum(whole[:-1], whole[1:])])])[0])
        assert_numbers_close(sequence.logprobs, scored.logprobs[0][len(tokens) - 1 :])
    assert len({tuple(results[str(name)].sequences[0].logprobs) for name in [None, *names]}) == 5


def test_saved_loaded_and_continued(tmp_path: Path) -> None:
    family, name = "deepseek_v3", "with head"
    trainer, other = tiny_trainer(base_model(family)), tiny_trainer(base_model(family))
    add(trainer, name)
    train(trainer, family, [name])
    trainer.save(name, tmp_path / "saved")
    other.create_adapter_from_checkpoint(name, tmp_path / "saved")
    assert other.shapes(name) == {each: array.shape for each, array in other.weights(name).items()}
    assert_same(train(other, family, [name])[name], train(trainer, family, [name])[name])


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_models_with_experts_run_packed(family: str) -> None:
    assert not tiny_trainer(base_model(family)).architecture.padded


def test_dropout_on_experts_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"dropout.*0\.1.*experts"):
        tiny_trainer(base_model("qwen3_moe")).create_adapter("a", LoraSpec(4, dropout=0.1))


def test_experts_with_a_norm_behind_them_take_no_adapters() -> None:
    """Such a norm sees what an expert computes, so the experts of a row cannot be added up before B."""
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
    architecture = read_architecture(model)
    assert not architecture.experts
    assert architecture.has_other_experts
