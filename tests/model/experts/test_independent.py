"""Adapters on experts in PEFT's form, ``target_parameters``: alone, in company, and PEFT itself are equal."""

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.support.models.reference import (
    TOLERANCE,
    Reference,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    tolerance_of,
    with_random_weights,
)
from tests.support.models.sampling import prompt, request, run, toy_sampler
from tests.support.models.tiny_models import EXPERT_FAMILIES, the_result, tiny_model, tiny_trainer
from twinkle.errors import InvalidInputError
from twinkle.model import AdamParams, Datum, LoraSpec, MultiLoraTransformersModel, Trainer, TrainItem, TransformersModel

pytestmark = pytest.mark.matrix

STEPS = 3
INDEPENDENT: Mapping[str, LoraSpec] = {
    "by switch": LoraSpec(4, alpha=6, seed=1, experts="independent"),
    "by name": LoraSpec(
        3,
        alpha=5,
        seed=2,
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"mlp.experts.gate_up_proj": 6},
        alpha_pattern={"mlp.experts.gate_up_proj": 8},
    ),
    "down alone": LoraSpec(9, alpha=9, seed=3, target_parameters=["mlp.experts.down_proj"]),
    "gate and up alone": LoraSpec(8, alpha=4, seed=4, target_parameters=["experts.gate_up_proj"]),
}
OTHERS: Mapping[str, LoraSpec] = {
    "shared-outer": LoraSpec(5, alpha=7, seed=5),
    "experts": LoraSpec(16, alpha=32, seed=6, train_attn=False),
    "attention": LoraSpec(12, seed=7, train_mlp=False),
    "head": LoraSpec(8, seed=8, train_unembed=True),
}
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")


@cache
def base_model(family: str) -> PreTrainedModel:
    return tiny_model(family)


def add(trainer: Trainer, name: str) -> None:
    trainer.create_adapter(name, {**INDEPENDENT, **OTHERS}[name])
    trainer.restore(name, with_random_weights(trainer, name, seed=len(name), size=0.1))


def item(family: str, name: str, step: int) -> TrainItem:
    number = list({**INDEPENDENT, **OTHERS}).index(name)
    loss = LOSSES[number % len(LOSSES)]
    lengths = (7 + 3 * number, 12)
    data = [random_datum(base_model(family), loss, length, seed=100 * step + number) for length in lengths]
    return TrainItem(name, data, loss)


def adam(step: int) -> AdamParams:
    return AdamParams(learning_rate=3e-3, eps=0.1, weight_decay=0.05 * step, grad_clip_norm=2.0 * step)


def peft_config(trainer: Trainer, name: str) -> peft.LoraConfig:
    config, spec = trainer.peft_config(name), trainer.spec(name)
    fields = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern", "use_rslora")
    return peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, **{field: config[field] for field in fields})


def train(trainer: Trainer, family: str, names: Sequence[str]) -> dict[str, list[tuple]]:
    """Take steps in which all tenants share a batch; return what each of them got."""
    history: dict[str, list[tuple]] = {name: [] for name in names}
    for step in range(STEPS):
        for name, outcome in zip(names, trainer.forward_backward([item(family, n, step) for n in names]), strict=True):
            result, gradients = the_result(outcome), trainer.gradients(name)
            norm = trainer.optim_step(name, adam(step))["unclipped_grad_l2:mean"]
            loss = result.metrics["loss:sum"]
            history[name].append((result.logprobs, loss, gradients, norm, trainer.weights(name)))
    return history


@cache
def company(family: str) -> dict[str, list[tuple]]:
    trainer = tiny_trainer(base_model(family))
    names = [*INDEPENDENT, *OTHERS]
    for name in names:
        add(trainer, name)
    return train(trainer, family, names)


def assert_same(ours: Sequence[tuple], theirs: Sequence[tuple], tolerance: float = TOLERANCE) -> None:
    for left, right in zip(ours, theirs, strict=True):
        for mine, other in zip(left[0], right[0], strict=True):
            assert_numbers_close(mine, other, tolerance)
        assert_numbers_close(left[1], right[1], tolerance)
        assert_tensors_close(left[2], right[2], tolerance)
        assert_numbers_close(left[3], right[3], tolerance)
        assert_tensors_close(left[4], right[4])


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_in_company_equals_peft(family: str) -> None:
    for name, spec in INDEPENDENT.items():
        trainer = tiny_trainer(base_model(family))
        add(trainer, name)
        plain = Reference(base_model(family), spec, trainer.weights(name), peft_config(trainer, name))
        steps = []
        for step in range(STEPS):
            result, gradients = plain.forward_backward(item(family, name, step)), plain.gradients()
            norm = plain.optim_step(adam(step))
            steps.append((result.logprobs, result.loss, gradients, norm, plain.weights()))
        assert_same(company(family)[name], steps, tolerance_of(family))


def test_in_company_equals_alone() -> None:
    family = "qwen3_moe"
    for name in ("by switch", "by name", "shared-outer"):
        trainer = tiny_trainer(base_model(family))
        add(trainer, name)
        assert_same(company(family)[name], train(trainer, family, [name])[name])


def test_the_sampler_computes_what_the_trainer_does() -> None:
    trainer = tiny_trainer(base_model("deepseek_v3"))
    for name in INDEPENDENT:
        add(trainer, name)
    sampler, tokens = toy_sampler(trainer), prompt(23)
    results = run(sampler, [request(name, name, tokens, max_tokens=6, temperature=0.0) for name in INDEPENDENT])
    for name in INDEPENDENT:
        (sequence,) = results[name].sequences
        whole = np.concatenate([tokens, sequence.tokens])
        scored = the_result(trainer.forward([TrainItem(name, [Datum(whole[:-1], whole[1:])])])[0])
        assert_numbers_close(sequence.logprobs, scored.logprobs[0][len(tokens) - 1 :])


@pytest.mark.parametrize("name", ["by switch", "by name"])
def test_saved_files_are_peft_s_and_continue(name: str, tmp_path: Path) -> None:
    family = "deepseek_v3"
    trainer, other = tiny_trainer(base_model(family)), tiny_trainer(base_model(family))
    add(trainer, name)
    train(trainer, family, [name])
    trainer.save(name, tmp_path / "saved")
    other.create_adapter_from_checkpoint(name, tmp_path / "saved")
    assert_same(train(other, family, [name])[name], train(trainer, family, [name])[name])
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base_model(family)), tmp_path / "saved").eval()
    again = tiny_trainer(base_model(family))
    again.create_adapter_from_checkpoint(name, tmp_path / "saved")
    datum = item(family, name, 0).data[0]
    ours = the_result(again.forward([TrainItem(name, [Datum(datum.tokens, datum.targets)])])[0]).logprobs
    assert_logprobs_close(ours, [target_logprobs(model, datum).detach().numpy()])


def test_a_checkpoint_of_peft_is_read_with_its_patterns(tmp_path: Path) -> None:
    """A file that PEFT itself wrote, of random weights."""
    trainer = tiny_trainer(base_model("qwen3_moe"))
    add(trainer, "by name")
    model = Reference(
        base_model("qwen3_moe"), trainer.spec("by name"), trainer.weights("by name"), peft_config(trainer, "by name")
    ).model
    model.save_pretrained(tmp_path)
    assert "experts.base_layer.lora_A" in " ".join(load_file(tmp_path / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"]
    trainer.create_adapter_from_checkpoint("read", tmp_path, optimizer=False)
    assert_tensors_close(trainer.weights("read"), trainer.weights("by name"))
    assert trainer.spec("read").rank_pattern == {"mlp.experts.gate_up_proj": 6}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraSpec(4, experts="per expert"), r"experts: got 'per expert', allowed: one of"),
        (LoraSpec(4, experts="independent", train_mlp=False), r"experts: got 'independent'.*train_mlp"),
        (LoraSpec(4, target_parameters=["mlp.router"]), r"target_parameters: got 'mlp.router'.*gate_up_proj"),
        (LoraSpec(4, target_parameters=["experts.down_proj"], dropout=0.1), r"dropout: got 0.1"),
        (
            LoraSpec(4, target_modules=["w1", "w2", "w3"], target_parameters=["experts.down_proj"]),
            r"target_parameters.*no part of the modules",
        ),
        (LoraSpec(4, target_modules=["gate_proj"]), r"target_modules: got 'gate_proj', .*'v_proj', 'w1', 'w2', 'w3'\]"),
    ],
)
def test_wrong_options_are_refused(spec: LoraSpec, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny_trainer(base_model("qwen3_moe")).create_adapter("a", spec)


def test_library_classes_take_target_parameters(tmp_path: Path) -> None:
    """TransformersModel hands the config to PEFT, MultiLoraTransformersModel to the Trainer; initial weights agree."""
    base_model("qwen3_moe").save_pretrained(tmp_path)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["mlp.experts.gate_up_proj", "experts.down_proj"])
    states = []
    for model in (
        TransformersModel(model_id=str(tmp_path), mixed_precision="no"),
        MultiLoraTransformersModel(model_id=str(tmp_path), mixed_precision="no"),
    ):
        model.add_adapter_to_model("mine", copy.deepcopy(config), seed=7)
        state = model.get_state_dict(adapter_name="mine")
        states.append({name: each.detach().float().numpy() for name, each in state.items()})
    assert_tensors_close(states[0], states[1])
