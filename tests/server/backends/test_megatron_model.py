"""A model with ``backend: megatron`` in one process: the embedded runtime loads it as any other."""

from typing import Any

import numpy as np
import pytest

import twinkle

if not twinkle.exists("megatron-core"):
    pytest.skip("megatron-core is not installed; `make test-megatron` does that", allow_module_level=True)

from tests.support.models.sampling import run
from twinkle.errors import CapacityError
from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.sampler import SampleRequest, SamplingParams, TorchSampler
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import load_served_model
from twinkle.server.config import ServerConfig

pytestmark = pytest.mark.megatron

MODEL = "random://llama-tiny"
ROW = np.arange(1, 10)


def load(**args: Any) -> ServedModel:
    model = {"model_id": MODEL, "backend": "megatron", "device": "cpu", "dtype": "fp32", **args}
    applications = [
        {"name": "model", "import_path": "model", "args": model},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "torch"}},
    ]
    return load_served_model(ServerConfig.model_validate({"applications": applications}).served_models[0])


def item(adapter: str) -> TrainItem:
    return TrainItem(adapter, [Datum(ROW[:-1], ROW[1:], np.ones(len(ROW) - 1, np.float32))])


def scores(model: ServedModel, version: str | None) -> np.ndarray:
    assert isinstance(model.sampler, TorchSampler)
    request = SampleRequest("score", version, ROW, SamplingParams(max_tokens=1, seed=1), prompt_logprobs=True)
    return run(model.sampler, [request])["score"].prompt_logprobs[1:]


def test_it_trains_and_its_sampler_has_a_base_model_of_its_own() -> None:
    model = load()
    plain = Trainer.from_pretrained(MODEL, device="cpu", dtype="fp32")
    spec = LoraSpec(4, seed=5)
    for trainer in (model.trainer, plain):
        trainer.create_adapter("a", spec)
        for _ in range(2):
            trainer.forward_backward([item("a")])
            trainer.optim_step("a", AdamParams(1e-2))
    assert model.sampler is not None
    model.sampler.publish("v", "a")
    (mine,), (theirs,) = model.trainer.forward([item("a")]), plain.forward([item("a")])
    assert isinstance(mine, TrainResult)
    assert isinstance(theirs, TrainResult)
    np.testing.assert_allclose(mine.logprobs[0], theirs.logprobs[0], atol=1e-5)
    np.testing.assert_allclose(scores(model, "v"), theirs.logprobs[0], atol=2e-5)
    assert np.abs(scores(model, None) - theirs.logprobs[0]).max() > 1e-3  # the base model is another one
    model.trainer.forward_backward([item("a")])
    model.trainer.optim_step("a", AdamParams(1e-2))
    np.testing.assert_allclose(scores(model, "v"), theirs.logprobs[0], atol=2e-5)  # a version does not change


def test_all_parameters() -> None:
    assert load(train_mode="full").train_mode == "full"


def test_a_second_base_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="sampling beside backend: megatron needs a second copy of the base model"):
        load(memory_budget_gib=0.0015, max_tokens_per_batch=8)
