"""A vision model loads for text in every class of ours, also one whose images we do not place."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.models.plain_training import logps
from tests.support.models.reference import assert_logprobs_close, random_datum, target_logprobs
from tests.support.models.seeing_models import SEEING, seeing_datum, seeing_model
from tests.support.models.tiny_models import the_result
from twinkle.model import (
    AdamParams,
    FullSpec,
    FullTrainer,
    MultiLoraTransformersModel,
    TrainFailure,
    TrainItem,
    TransformersModel,
    TransformersValueModel,
)

FAMILIES = ["qwen2_vl", *SEEING]
ROWS = [
    {"input_ids": tokens.tolist(), "labels": [*tokens[1:].tolist(), -100]}
    for tokens in (np.random.default_rng(length).integers(3, 90, length) for length in (9, 5))
]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        seeing_model(family).save_pretrained(path)
        return path

    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_librarys_plain_model(family: str, folders) -> None:
    model = TransformersModel(model_id=str(folders(family)), mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("a", {**LORA, "lora_dropout": 0.0})
    outputs = model.forward_backward(inputs=ROWS, adapter_name="a")
    with torch.no_grad():
        assert torch.allclose(outputs["logps"], logps(seeing_model(family), ROWS)[1], atol=1e-5)


def test_a_config_that_names_no_class(folders, tmp_path: Path) -> None:
    shutil.copytree(folders("qwen2_vl"), tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "architectures": None}))
    model = TransformersModel(model_id=str(tmp_path / "copy"), mixed_precision="fp32", device="cpu")
    outputs = model.forward_only(inputs=ROWS)
    with torch.no_grad():
        assert torch.allclose(outputs["logps"], logps(seeing_model("qwen2_vl"), ROWS)[1], atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_the_librarys_multi_lora_model(family: str, folders) -> None:
    model = MultiLoraTransformersModel(model_id=str(folders(family)), mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model("a", LORA)
    outputs = model.forward_only(inputs=ROWS, adapter_name="a")
    with torch.no_grad():
        assert torch.allclose(outputs["logps"], logps(seeing_model(family), ROWS)[1], atol=1e-5)


def test_the_value_model(folders) -> None:
    model = TransformersValueModel(model_id=str(folders("qwen2_vl")), mixed_precision="fp32", device="cpu")
    assert model.forward_only(inputs=ROWS)["values"].abs().max() == 0  # a new head


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_training_all_parameters_leaves_the_tower_alone(family: str, folders, tmp_path: Path) -> None:
    """Weight decay must not change what no text uses. A checkpoint is the whole model, with its tower."""
    trainer = FullTrainer.from_pretrained(folders(family), device="cpu", dtype="fp32")
    trainer.create_adapter("run", FullSpec())
    plain = seeing_model(family)
    datum = random_datum(plain.get_decoder(), "cross_entropy", 12, seed=0)
    (result,) = trainer.forward_backward([TrainItem("run", [datum])])
    with torch.no_grad():
        assert_logprobs_close(the_result(result).logprobs, [target_logprobs(plain, datum).numpy()])
    trainer.optim_step("run", AdamParams(learning_rate=1e-2, weight_decay=0.5))
    trainer.save("run", tmp_path / "run", optimizer=False)
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run", dtype=torch.float32).state_dict()
    before = plain.state_dict()
    assert trained.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(trained[name], tensor) == ("visual" in name), name


def test_training_all_parameters_refuses_images(folders) -> None:
    trainer = FullTrainer.from_pretrained(folders("qwen3_vl"), device="cpu", dtype="fp32")
    trainer.create_adapter("run", FullSpec())
    (failure,) = trainer.forward([TrainItem("run", [seeing_datum(seeing_model("qwen3_vl"), [(64, 96)], 3)])])
    assert isinstance(failure, TrainFailure)
    assert "reads text only" in str(failure.error)
