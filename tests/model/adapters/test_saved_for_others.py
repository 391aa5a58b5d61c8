"""Adapters that the library saves, head included, in PEFT: it finds the base model by the name in the files."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.support.models.base_folders import write_base_folder
from tests.support.models.plain_training import features, logps
from twinkle.model import MultiLoraTransformersModel, TransformersModel

NAME = "a-1"
WITH_HEAD = ["q_proj", "lm_head"]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("modules", [WITH_HEAD, ["q_proj"]], ids=["head", "no head"])
@pytest.mark.parametrize("kind", [MultiLoraTransformersModel, TransformersModel])
def test_auto_peft_reads_what_was_saved(kind: Any, modules: list[str], tmp_path: Path) -> None:
    folder = write_base_folder(tmp_path / "base", tied=True)
    model = kind(model_id=str(folder), mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model(NAME, peft.LoraConfig(r=4, target_modules=modules))
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=NAME)
    for _ in range(2):
        model.forward_backward(inputs=features(8), adapter_name=NAME)
        model.clip_grad_and_step(adapter_name=NAME)
    where = Path(model.save("x", str(tmp_path), adapter_name=NAME))
    assert json.loads((where / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    assert (where / "USAGE.md").exists() == (modules == WITH_HEAD)
    with torch.no_grad():
        _, theirs, _ = logps(peft.AutoPeftModelForCausalLM.from_pretrained(where), features(8))
    ours = model.forward_only(inputs=features(8), adapter_name=NAME)["logps"]
    assert torch.allclose(ours, theirs, atol=1e-4)
