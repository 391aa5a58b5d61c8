"""Qwen3-VL-MoE: adapters on experts of a model that reads images, and texts, equal the plain formula and PEFT."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
from transformers import PreTrainedModel

from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import (
    Reference,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    with_random_weights,
)
from tests.support.models.sampling import request, run, toy_sampler
from tests.support.models.seeing_models import processing_of, seeing_datum, seeing_model
from tests.support.models.tiny_models import the_result
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, adopt_model
from twinkle.model.adapters.expert_exports import convert_folder
from twinkle.model.types import ADAPTER_FORMATS

pytestmark = pytest.mark.matrix

FAMILY, STEPS = "qwen3_vl_moe", 3
ADAM = AdamParams(learning_rate=3e-3, eps=0.1, grad_clip_norm=2.0)
SPECS: Mapping[str, LoraSpec] = {
    "images": LoraSpec(4, alpha=6, seed=1),
    "text": LoraSpec(8, alpha=8, seed=2, train_unembed=True),
    "both": LoraSpec(5, alpha=9, seed=3, train_attn=False),
    "independent": LoraSpec(3, alpha=4, seed=4, experts="independent"),
    "attention": LoraSpec(16, seed=5, train_mlp=False),
    "images too": LoraSpec(2, seed=6),
    "wide": LoraSpec(20, alpha=20, seed=7),
    "more text": LoraSpec(6, seed=8),
}


@cache
def base() -> PreTrainedModel:
    return seeing_model(FAMILY)


@cache
def rows(name: str) -> Sequence[Datum]:
    text = random_datum(base().get_decoder(), "cross_entropy", 11 + len(name), seed=len(name))
    images = [seeing_datum(base(), [(100, 70), (64, 130)], 1), seeing_datum(base(), [(33, 40)], 2)]
    return {"images": images, "independent": images[1:], "images too": images[:1], "both": [text, images[1]]}.get(
        name, [text]
    )


def trainer_with(names: Sequence[str]) -> Trainer:
    trainer = Trainer(adopt_model(copy.deepcopy(base())), model_id="tiny", processing=processing_of(base()))
    for name in names:
        trainer.create_adapter(name, SPECS[name])
        trainer.restore(name, with_random_weights(trainer, name, seed=len(name)))
    return trainer


def reference(name: str, trainer: Trainer) -> ExpertsReference | Reference:
    spec, weights = SPECS[name], trainer.weights(name)
    if spec.experts == "shared_outer":
        return ExpertsReference(base(), spec, weights)
    config = trainer.peft_config(name)
    fields = {field: config[field] for field in ("target_modules", "target_parameters")}
    return Reference(base(), spec, weights, peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, **fields))


def test_in_company_equals_the_plain_formula_and_peft() -> None:
    trainer = trainer_with(list(SPECS))
    references = {name: reference(name, trainer) for name in SPECS}
    for _ in range(STEPS):
        items = [TrainItem(name, rows(name)) for name in SPECS]
        for item, outcome in zip(items, trainer.forward_backward(items), strict=True):
            ours, theirs = the_result(outcome), references[item.adapter_id].forward_backward(item)
            assert_logprobs_close(ours.logprobs, theirs.logprobs)
            assert_numbers_close(ours.metrics["loss:sum"], theirs.loss)
            assert_tensors_close(trainer.gradients(item.adapter_id), references[item.adapter_id].gradients())
        for name, plain in references.items():
            trainer.optim_step(name, ADAM)
            plain.optim_step(ADAM)
            assert_tensors_close(trainer.weights(name), plain.weights())


def test_it_runs_packed() -> None:
    assert not trainer_with([]).architecture.padded


def test_saved_loaded_and_exported(tmp_path: Path) -> None:
    """What continues from a checkpoint equals what went on, and PEFT computes the same from its form."""
    trainer, item = trainer_with(["images"]), TrainItem("images", rows("images"))
    the_result(trainer.forward_backward([item])[0])
    trainer.optim_step("images", ADAM)
    trainer.save("images", tmp_path / "saved")
    trainer.create_adapter_from_checkpoint("loaded", tmp_path / "saved")
    results = [the_result(trainer.forward_backward([TrainItem(n, item.data)])[0]) for n in ("images", "loaded")]
    assert_logprobs_close(results[0].logprobs, results[1].logprobs)
    for name in ("images", "loaded"):
        trainer.optim_step(name, ADAM)
    assert_tensors_close(trainer.weights("loaded"), trainer.weights("images"))

    for form in ADAPTER_FORMATS:
        (tmp_path / form).mkdir()
        convert_folder(tmp_path / "saved", tmp_path / form, form)
        trainer.create_adapter_from_checkpoint(form, tmp_path / form, optimizer=False)
        read = the_result(trainer.forward([TrainItem(form, item.data)])[0])
        assert_logprobs_close(read.logprobs, results[0].logprobs)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base()), tmp_path / "peft").eval()
    assert_logprobs_close(results[0].logprobs, [target_logprobs(model, d).detach().numpy() for d in item.data])


def test_the_sampler_computes_what_the_trainer_does() -> None:
    names = ["images", "independent", "attention"]
    trainer = trainer_with(names)
    sampler, seen = toy_sampler(trainer), rows("images")[0]
    asked = [request(name, name, seen.tokens, max_tokens=5, temperature=0.0) for name in names]
    asked = [dataclasses.replace(each, images=seen.images) for each in asked]
    results = run(sampler, asked)
    for name in names:
        (sequence,) = results[name].sequences
        whole = np.concatenate([seen.tokens, sequence.tokens])
        datum = Datum(whole[:-1], whole[1:], images=seen.images)
        scored = the_result(trainer.forward([TrainItem(name, [datum])])[0])
        assert_numbers_close(sequence.logprobs, scored.logprobs[0][len(seen.tokens) - 1 :])
