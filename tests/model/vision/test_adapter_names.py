"""Adapters of vision models: files for PEFT on either class of the model, and files of either form are read."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.models.reference import (
    assert_logprobs_close,
    random_datum,
    target_logprobs,
    with_random_weights,
)
from tests.support.models.seeing_models import SEEING, image_processor, seeing_datum, seeing_model
from tests.support.models.tiny_models import the_result
from twinkle.errors import CheckpointError, InvalidInputError
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem
from twinkle.model.adapters.linear_attention_forms import with_joint_projections
from twinkle.model.types import text_name

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def folder(family: str, processor: bool = True) -> Path:
        path = tmp_path_factory.mktemp(family)
        model = seeing_model(family)
        model.save_pretrained(path)
        if processor:
            image_processor(model.config.vision_config.patch_size).save_pretrained(path)
        return path

    return folder


def trainer_on(folder: Path) -> Trainer:
    return Trainer.from_pretrained(folder, device="cpu", dtype="fp32")


def trained(folder: Path, directory: Path, **options: object) -> Trainer:
    """Return a trainer with an adapter whose weights are random and that is saved in a directory."""
    trainer = trainer_on(folder)
    trainer.create_adapter("a", LoraSpec(4, seed=1, **options))
    with_random_weights(trainer, "a", 3)
    trainer.save("a", directory)
    return trainer


def for_peft(directory: Path) -> Path:
    """Rewrite an adapter in place, so that query, key and value of linear attention are as PEFT reads them."""
    config = json.loads((directory / "adapter_config.json").read_text())
    config, tensors = with_joint_projections(config, load_file(directory / WEIGHTS))
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / WEIGHTS)
    return directory


def without_language_model(directory: Path, target: Path) -> Path:
    """Copy an adapter, with the names that Tinker's files and the text model have."""
    target.mkdir()
    for name in ("adapter_config.json", "trainer_state.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    for name in (WEIGHTS, "optimizer.safetensors"):
        save_file({text_name(key): tensor for key, tensor in load_file(directory / name).items()}, target / name)
    return target


def logprobs(trainer: Trainer, datum: Datum) -> list[np.ndarray]:
    return the_result(trainer.forward([TrainItem("a", [datum])])[0]).logprobs


@pytest.mark.parametrize("family", SEEING)
def test_peft_on_the_model_with_its_tower(family: str, folders, tmp_path: Path) -> None:
    """The head has an adapter too, one module another rank, and images are in the sequence."""
    options = {"train_unembed": True, "rank_pattern": {r"layers\.1\.mlp\.up_proj": 6}}
    trainer = trained(folders(family), tmp_path / "a", **options)
    names = load_file(tmp_path / "a" / WEIGHTS)
    assert all("model.language_model.layers." in name or ".lm_head." in name for name in names)
    base = AutoModelForImageTextToText.from_pretrained(folders(family), dtype=torch.float32)
    datum = seeing_datum(base, [(64, 96), (33, 40)], 3)
    peft = PeftModel.from_pretrained(base, for_peft(tmp_path / "a")).eval()
    with torch.no_grad():
        assert_logprobs_close(logprobs(trainer, datum), [target_logprobs(peft, datum).numpy()])


def test_peft_on_the_text_model_of_qwen3_5(folders, tmp_path: Path) -> None:
    trainer = trained(folders("qwen3_5"), tmp_path / "a")
    base = AutoModelForCausalLM.from_pretrained(folders("qwen3_5"), dtype=torch.float32)
    datum = random_datum(base, "cross_entropy", 19, seed=0)
    peft = PeftModel.from_pretrained(base, for_peft(without_language_model(tmp_path / "a", tmp_path / "b"))).eval()
    with torch.no_grad():
        assert_logprobs_close(logprobs(trainer, datum), [target_logprobs(peft, datum).numpy()])


def test_peft_reads_tinkers_names_by_a_mapping(folders, tmp_path: Path) -> None:
    trainer = trained(folders("qwen3_vl"), tmp_path / "a", rank_pattern={r"language_model\.layers\.1\..*": 6})
    base = AutoModelForImageTextToText.from_pretrained(folders("qwen3_vl"), dtype=torch.float32)
    datum = seeing_datum(base, [(64, 96)], 3)
    directory = without_language_model(tmp_path / "a", tmp_path / "b")
    mapping = {r"^model\.layers": "model.language_model.layers"}  # as docs/adapters.md has it
    peft = PeftModel.from_pretrained(base, directory, key_mapping=mapping).eval()
    with torch.no_grad():
        assert_logprobs_close(logprobs(trainer, datum), [target_logprobs(peft, datum).numpy()])


@pytest.mark.parametrize("family", SEEING)
def test_files_of_either_form_are_read(family: str, folders, tmp_path: Path) -> None:
    trainer = trained(folders(family), tmp_path / "a")
    for number, directory in enumerate([tmp_path / "a", without_language_model(tmp_path / "a", tmp_path / "b")]):
        trainer.create_adapter_from_checkpoint(f"read {number}", directory)
        for name, array in trainer.weights("a").items():
            np.testing.assert_array_equal(trainer.weights(f"read {number}")[name], array)


def test_a_file_with_names_of_both_forms_is_refused(folders, tmp_path: Path) -> None:
    trainer = trained(folders("qwen3_vl"), tmp_path / "a")
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, text_name(name): tensors[name].clone()}, tmp_path / "a" / WEIGHTS)
    with pytest.raises(CheckpointError, match="both with and without language_model"):
        trainer.load("a", tmp_path / "a")


def test_an_adapter_of_the_text_model_goes_on_with_the_tower(folders, tmp_path: Path) -> None:
    """A Qwen3.5 folder without an image processor is loaded for text. Its snapshots and files fit the whole model."""
    text, seeing = trained(folders("qwen3_5", processor=False), tmp_path / "text"), trainer_on(folders("qwen3_5"))
    assert (text.architecture.vision, text.architecture.layers_path) == (None, "model.layers")
    assert seeing.architecture.vision is not None
    seeing.restore("a", text.snapshot("a"))
    seeing.create_adapter_from_checkpoint("read", tmp_path / "text")
    seeing.save("a", tmp_path / "seeing")
    text.create_adapter_from_checkpoint("back", tmp_path / "seeing")
    for other in (seeing.weights("a"), seeing.weights("read"), text.weights("back")):
        other = {text_name(name): array for name, array in other.items()}
        for name, array in text.weights("a").items():
            np.testing.assert_array_equal(other[name], array)


def test_equal_seeds_draw_equal_weights_with_and_without_the_tower(folders) -> None:
    text, seeing = trainer_on(folders("qwen3_5", processor=False)), trainer_on(folders("qwen3_5"))
    for trainer in (text, seeing):
        trainer.create_adapter("a", LoraSpec(4, seed=8))
    other = {text_name(name): array for name, array in seeing.weights("a").items()}
    for name, array in text.weights("a").items():
        np.testing.assert_array_equal(other[name], array)


@pytest.mark.parametrize(
    "wanted",
    [
        ["model.language_model.layers.1.self_attn.q_proj"],
        ["model.layers.1.self_attn.q_proj"],
        ["layers.1.self_attn.q_proj"],
        r".*language_model.*\.1\..*q_proj",
        r"model\.layers\.1\..*\.q_proj",
    ],
)
def test_target_modules_may_have_either_name(wanted: list[str] | str, folders) -> None:
    trainer = _shared(folders("qwen3_vl"))
    trainer.create_adapter("named", LoraSpec(4, target_modules=wanted, seed=1))
    modules = {name.partition(".lora_")[0] for name in trainer.weights("named")}
    assert modules == {"base_model.model.model.language_model.layers.1.self_attn.q_proj"}
    trainer.remove_adapter("named")


@pytest.mark.parametrize("pattern", [r"language_model\.layers\.0\..*", r"model\.layers\.0\..*"])
def test_patterns_of_ranks_may_have_either_name(pattern: str, folders, tmp_path: Path) -> None:
    """Saved patterns fit both classes of the model."""
    trainer = _shared(folders("qwen3_vl"))
    trainer.create_adapter("named", LoraSpec(4, target_modules=["q_proj"], rank_pattern={pattern: 6}, seed=1))
    ranks = [array.shape[0] for name, array in sorted(trainer.weights("named").items()) if ".lora_A." in name]
    assert ranks == [6, 4, 4]
    saved = trainer.peft_config("named")["rank_pattern"]
    if "language_model" in pattern:
        assert saved == {r"layers\.0\.self_attn\.q_proj": 6}
    trainer.remove_adapter("named")


def test_the_tower_gets_no_adapter(folders) -> None:
    trainer = _shared(folders("qwen2_5_vl"))  # its tower has layers named gate_proj, too
    trainer.create_adapter("named", LoraSpec(4, target_modules=["gate_proj"], seed=1))
    assert not any("visual" in name for name in trainer.weights("named"))
    assert trainer.peft_config("named")["target_modules"] == [f"layers.{layer}.mlp.gate_proj" for layer in range(3)]
    trainer.remove_adapter("named")
    with pytest.raises(InvalidInputError, match="target_modules"):
        trainer.create_adapter("named", LoraSpec(4, target_modules=["visual.blocks.0.mlp.gate_proj"], seed=1))


@cache
def _shared(folder: Path) -> Trainer:
    return trainer_on(folder)
