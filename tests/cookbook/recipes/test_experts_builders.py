"""tinker-cookbook's builders read adapters on experts in Tinker's form, and compute what was trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.cookbook.recipes.test_weights_builders import BUILD, PYTHON, run
from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import with_random_weights
from tests.support.models.seeing_models import seeing_model
from tests.support.models.tiny_models import the_result, tiny_model, tiny_trainer
from twinkle.model import Datum, LoraSpec, TrainItem
from twinkle.model.adapters.expert_exports import convert_folder

pytestmark = pytest.mark.cookbook

SPEC = LoraSpec(4, alpha=6, seed=1)
SEES = "qwen3_vl_moe"
# build_hf_model does not know Mixtral's names, and build_lora_adapter refuses DeepSeek.
BUILT = {
    "qwen3_moe": ("build_hf_model", "build_lora_adapter"),
    "olmoe": ("build_hf_model", "build_lora_adapter"),
    "deepseek_v3": ("build_hf_model",),
    "mixtral": ("build_lora_adapter",),
    SEES: ("build_hf_model", "build_lora_adapter"),
}


def build(builder: str, base: Path, adapter: Path, output: Path) -> None:
    options = {"base_model": str(base), "adapter_path": str(adapter), "output_path": str(output)}
    done = run(BUILD, builder, json.dumps(options))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family", BUILT)
def test_builders_compute_what_was_trained(family: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("the cookbook is not installed; `make test-cookbook` does that")
    model: Any = seeing_model(family) if family == SEES else tiny_model(family)
    model.save_pretrained(tmp_path / "base")
    trainer = tiny_trainer(model)
    trainer.create_adapter("a", SPEC)
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    trainer.save("a", tmp_path / "own", optimizer=False)
    (tmp_path / "adapter").mkdir()
    convert_folder(tmp_path / "own", tmp_path / "adapter", "tinker")
    tokens = np.arange(3, 16)
    expected = ExpertsReference(model, SPEC, trainer.weights("a")).logits(torch.from_numpy(tokens)[None]).detach()
    assert (model(input_ids=torch.from_numpy(tokens)[None]).logits - expected).abs().max() > 1e-2
    if "build_hf_model" in BUILT[family]:
        build("build_hf_model", tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
        loads = AutoModelForImageTextToText if family == SEES else AutoModelForCausalLM
        merged = loads.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert (merged(input_ids=torch.from_numpy(tokens)[None]).logits - expected).abs().max() < 1e-4
    if "build_lora_adapter" in BUILT[family]:
        build("build_lora_adapter", tmp_path / "base", tmp_path / "adapter", tmp_path / "lora")
        trainer.create_adapter_from_checkpoint("built", tmp_path / "lora", optimizer=False)
        item = TrainItem("built", [Datum(tokens[:-1], tokens[1:])])
        ours = torch.from_numpy(the_result(trainer.forward([item])[0]).logprobs[0])
        logprobs = expected[0, :-1].log_softmax(-1).gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0]
        assert (ours - logprobs).abs().max() < 1e-4
