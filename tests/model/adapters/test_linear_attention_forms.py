"""Adapters on query, key and value of linear attention, in the form that PEFT reads, give the same numbers."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.reference import (
    Reference,
    assert_logprobs_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    with_random_weights,
)
from tests.support.models.tiny_models import the_result, tiny_model, tiny_trainer
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model import LoraSpec, Trainer, TrainItem
from twinkle.model.adapters.expert_exports import convert
from twinkle.model.adapters.linear_attention_forms import has_parts, with_joint_projections

NET = "base_model.model.model.layers.1.linear_attn"


def trained(spec: LoraSpec) -> Trainer:
    trainer = tiny_trainer(tiny_model("qwen3_5"))
    trainer.create_adapter("a", spec)
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    return trainer


def saved(trainer: Trainer, folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    trainer.save("a", folder)
    return (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )


DATUM = random_datum(tiny_model("qwen3_5"), "cross_entropy", 13, seed=1)


def assert_peft_agrees(trainer: Trainer, folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Compare log-probabilities of the trainer with those of PEFT, which loads the adapter from a folder."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config, sort_keys=True))
    save_file(tensors, folder / "adapter_model.safetensors")
    model = peft.PeftModel.from_pretrained(tiny_model("qwen3_5"), folder).eval()
    with torch.no_grad():
        theirs = target_logprobs(model, DATUM).numpy()
    assert_logprobs_close(the_result(trainer.forward([TrainItem("a", [DATUM])])[0]).logprobs, [theirs])


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_gives_the_same_logits(rslora: bool, tmp_path: Path) -> None:
    trainer = trained(LoraSpec(rank=4, alpha=6, seed=1, use_rslora=rslora, train_unembed=True))
    config, tensors = saved(trainer, tmp_path / "own")
    assert has_parts(tensors)
    assert not any("in_proj_a" in name or "in_proj_b" in name for name in tensors)
    written, joined = convert(config, tensors, "peft")
    assert convert(config, tensors, "tinker")[1].keys() == tensors.keys()
    assert convert(config, tensors, "vllm")[1].keys() == joined.keys()
    assert joined[f"{NET}.in_proj_qkv.lora_A.weight"].shape == (12, 32)
    assert written["rank_pattern"] == {"linear_attn.in_proj_qkv": 12}
    assert_peft_agrees(trainer, tmp_path / "peft", written, joined)


def test_ranks_and_scalings_of_single_modules_stay(tmp_path: Path) -> None:
    """One pattern fits the joint layer too, and one gives a projection another scaling than its neighbours have."""
    ranks = {r"layers\.1\.linear_attn\..*": 6, "in_proj_v": 2, "up_proj": 3}
    spec = LoraSpec(rank=4, alpha=6, seed=1, rank_pattern=ranks, alpha_pattern={"in_proj_k": 9.0})
    trainer = trained(spec)
    written, joined = with_joint_projections(*saved(trainer, tmp_path / "own"))
    sizes = {layer: len(joined[f"{NET}.in_proj_qkv.lora_A.weight".replace("1", layer)]) for layer in "01"}
    assert sizes == {"0": 4 + 4 + 2, "1": 3 * 6}
    assert_peft_agrees(trainer, tmp_path / "peft", written, joined)


def test_an_adapter_without_the_projections_is_returned_as_it_is(tmp_path: Path) -> None:
    config, tensors = saved(trained(LoraSpec(rank=4, target_modules=["q_proj", "in_proj_z"])), tmp_path / "own")
    assert with_joint_projections(config, tensors) == (config, tensors)


def test_a_part_of_the_projections_is_refused(tmp_path: Path) -> None:
    config, tensors = saved(trained(LoraSpec(rank=4, target_modules=["in_proj_q", "in_proj_v"])), tmp_path / "own")
    with pytest.raises(UnsupportedError, match="linear_attn: other programs need all of in_proj_q, in_proj_k"):
        with_joint_projections(config, tensors)


def test_pefts_adapter_on_the_whole_layer_trains_as_in_peft_beside_one_on_its_projections(tmp_path: Path) -> None:
    """``all-linear`` means what it means in PEFT: one A for query, key and value, and the gates, too."""
    model, trainer = tiny_model("qwen3_5"), tiny_trainer(tiny_model("qwen3_5"))
    specs = {"whole": LoraSpec(4, seed=1, target_modules="all-linear"), "parts": LoraSpec(6, seed=2)}
    items = []
    for number, (name, spec) in enumerate(specs.items()):
        trainer.create_adapter(name, spec)
        trainer.restore(name, with_random_weights(trainer, name, number))
        data = [random_datum(model, "cross_entropy", length, length + number) for length in (9, 70)]
        items.append(TrainItem(name, data))
    assert any("in_proj_qkv" in name for name in trainer.weights("whole"))
    for item, outcome in zip(items, trainer.forward_backward(items), strict=True):
        plain = Reference(model, specs[item.adapter_id], trainer.weights(item.adapter_id))
        assert_logprobs_close(the_result(outcome).logprobs, plain.forward_backward(item).logprobs)
        assert_tensors_close(trainer.gradients(item.adapter_id), plain.gradients(), 3e-5)
    trainer.save("whole", tmp_path / "whole")
    trainer.create_adapter_from_checkpoint("read", tmp_path / "whole")
    assert trainer.weights("read").keys() == trainer.weights("whole").keys()


def test_the_whole_layer_and_its_projections_in_one_adapter_are_refused() -> None:
    trainer = tiny_trainer(tiny_model("qwen3_5"))
    with pytest.raises(InvalidInputError, match=r"target_modules.*either in_proj_qkv or some of in_proj_q, in_proj_k"):
        trainer.create_adapter("a", LoraSpec(4, target_modules=["in_proj_qkv", "in_proj_v"]))
    trainer.create_adapter("a", LoraSpec(4, target_modules=r".*\.in_proj_.*"))  # a pattern means PEFT's modules
    found = {name.split(".")[-3] for name in trainer.weights("a")}
    assert found == {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"}


def test_the_whole_layer_by_its_parameter_beside_its_projections_is_refused() -> None:
    trainer = tiny_trainer(tiny_model("qwen3_5"))
    spec = LoraSpec(4, target_modules=["in_proj_v"], target_parameters=["linear_attn.in_proj_qkv.weight"])
    with pytest.raises(InvalidInputError, match=r"target_parameters.*in_proj_qkv\.weight.*nothing beside in_proj_v"):
        trainer.create_adapter("a", spec)


def test_a_file_with_the_whole_layer_and_its_projections_is_refused(tmp_path: Path) -> None:
    config, tensors = saved(
        trained(LoraSpec(rank=4, target_modules=["in_proj_q", "in_proj_k", "in_proj_v"])), tmp_path / "own"
    )
    _, joint = with_joint_projections(config, tensors)
    with pytest.raises(UnsupportedError, match="linear_attn: got in_proj_qkv beside its parts in_proj_q"):
        with_joint_projections(config, {**tensors, **joint})
