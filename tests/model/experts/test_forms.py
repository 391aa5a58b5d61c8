"""Adapters on experts in the forms of Tinker, PEFT and vLLM give the same numbers, and all forms can be read."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import (
    assert_logprobs_close,
    assert_numbers_close,
    random_datum,
    tolerance_of,
    with_random_weights,
)
from tests.support.models.sampling import prompt
from tests.support.models.tiny_models import EXPERT_FAMILIES, the_result, tiny_model, tiny_trainer
from twinkle.errors import CheckpointError, InvalidInputError, UnsupportedError
from twinkle.model import LoraSpec, TrainItem
from twinkle.model.adapters.expert_exports import convert, convert_folder, for_peft, for_vllm, for_vllm_3d
from twinkle.model.types import ADAPTER_FORMATS, tinker_name
from twinkle.server.services.checkpoints.export import conversion_bytes

SPEC = LoraSpec(rank=4, alpha=6, seed=1)


def saved(family: str, folder: Path, spec: LoraSpec = SPEC) -> tuple[dict, dict[str, torch.Tensor], np.ndarray]:
    """Save an adapter; return its configuration, its tensors, and the logits of the plain formula."""
    model = tiny_model(family)
    trainer = tiny_trainer(model)
    trainer.create_adapter("a", spec)
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    trainer.save("a", folder)
    tokens, logits = torch.from_numpy(prompt(13))[None], np.zeros(0)
    if spec.experts == "shared_outer" and spec.target_parameters is None:
        logits = ExpertsReference(model, spec, trainer.weights("a")).logits(tokens).detach().numpy()
    return (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
        logits,
    )


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_peft_gives_the_same_logits(family: str, rslora: bool, tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=6, seed=1, use_rslora=rslora)
    config, tensors, expected = saved(family, tmp_path / "own", spec)
    folder = write(tmp_path / "peft", *convert(config, tensors, "peft", alternating=family == "gpt_oss"))
    model = peft.PeftModel.from_pretrained(tiny_model(family), folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(prompt(13))[None]).logits
    assert_numbers_close(logits.numpy(), expected, tolerance_of(family))


def test_tinkers_names_of_attention_are_read_too(tmp_path: Path) -> None:
    """In Tinker's files, the attention of gpt-oss is ``attn``. No other name of it is known."""
    config, tensors, _ = saved("gpt_oss", tmp_path / "own")
    renamed = {tinker_name(name, "gpt_oss"): tensor for name, tensor in tensors.items()}
    assert "base_model.model.model.layers.1.attn.o_proj.lora_A.weight" in renamed
    assert renamed.keys() & tensors.keys() == {name for name in tensors if ".self_attn." not in name}
    trainer = tiny_trainer(tiny_model("gpt_oss"))
    trainer.create_adapter_from_checkpoint("a", write(tmp_path / "tinker", config, renamed), optimizer=False)
    for name, array in trainer.weights("a").items():
        np.testing.assert_array_equal(array, tensors[name].numpy())
    unknown = {name.replace(".self_attn.", ".attention."): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="unexpected"):
        trainer.create_adapter_from_checkpoint("b", write(tmp_path / "unknown", config, unknown), optimizer=False)


def test_what_vllm_reads_is_the_same_for_each_expert(tmp_path: Path) -> None:
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own")
    written, flat = for_vllm(config, tensors)
    assert written["lora_alpha"] == written["r"] == 4
    assert written["target_modules"] == ["experts", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert all(tensor.dim() == 2 for tensor in flat.values())
    front = "base_model.model.model.layers.1.mlp.experts"
    for expert in range(4):
        for projection, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            a, b = (tensors[f"{front}.{projection}.lora_{factor}.weight"] for factor in "AB")
            ours = flat[f"{front}.{expert}.{name}.lora_B.weight"] @ flat[f"{front}.{expert}.{name}.lora_A.weight"]
            theirs = 6 / 4 * (b[expert % len(b)] @ a[expert % len(a)])
            assert_numbers_close(ours.numpy(), theirs.numpy())


def test_an_adapter_without_experts_is_returned_as_it_is(tmp_path: Path) -> None:
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own", LoraSpec(rank=4, train_mlp=False))
    for form in (for_peft, for_vllm):
        assert form(config, tensors) == (config, tensors)


@pytest.mark.parametrize("form", [for_peft, for_vllm, for_vllm_3d])
def test_a_part_of_the_experts_is_refused(form: object, tmp_path: Path) -> None:
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own", LoraSpec(rank=4, target_modules=["q_proj", "w1"]))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts: it has one of gate and up; expected both"):
        form(config, tensors)


def test_vllm_needs_all_of_the_experts(tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, target_parameters=["mlp.experts.down_proj"])
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own", spec)
    for form in (for_vllm, for_vllm_3d):
        with pytest.raises(UnsupportedError, match=r"vLLM needs adapters on gate, up and down"):
            form(config, tensors)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"format: got 'gguf', allowed: .*tinker, peft, vllm, vllm-3d"):
        convert({}, {}, "gguf")


# --- from one form to another, and back -------------------------------------------------------------------------------

SPECS = {
    "shared-outer": SPEC,
    "independent": LoraSpec(rank=4, alpha=6, seed=1, experts="independent"),
    "patterns": LoraSpec(
        rank=4,
        alpha=6,
        seed=1,
        use_rslora=True,
        rank_pattern={"w1": 2, "w3": 6, "o_proj": 3},
        alpha_pattern={"w2": 5, r"layers\.1\.self_attn\.o_proj": 9},
    ),
}


@pytest.mark.parametrize("form", ADAPTER_FORMATS)
@pytest.mark.parametrize("name", SPECS)
def test_all_forms_can_be_read(name: str, form: str, tmp_path: Path) -> None:
    """A file in any form is loaded as a new adapter, trained or sampled, and computes the same."""
    model = tiny_model("deepseek_v3")
    trainer = tiny_trainer(model)
    trainer.create_adapter("a", SPECS[name])
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    trainer.save("a", tmp_path / "own", optimizer=False)
    (tmp_path / "other").mkdir()
    convert_folder(tmp_path / "own", tmp_path / "other", form)
    read = trainer.create_adapter_from_checkpoint("b", tmp_path / "other", optimizer=False)
    data = [random_datum(model, "cross_entropy", 13, seed=1)]
    ours, theirs = (the_result(trainer.forward([TrainItem(each, data)])[0]).logprobs for each in "ba")
    assert_logprobs_close(ours, theirs)
    shares = any(each.endswith("w1.lora_A.weight") for each in trainer.weights("b"))
    assert shares == (name != "independent" and form in ("tinker", "vllm"))
    assert bool(read.target_parameters) != shares


@pytest.mark.parametrize("form", ADAPTER_FORMATS)
def test_an_adapter_is_read_in_the_form_that_it_has_here(form: str, tmp_path: Path) -> None:
    """An adapter of Tinker's clients loads what it was exported as: its own weights again, bit by bit."""
    trainer = tiny_trainer(tiny_model("deepseek_v3"))
    trainer.create_adapter("a", LoraSpec(rank=4, alpha=4, seed=1))
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    trainer.save("a", tmp_path / "own", optimizer=False)
    (tmp_path / "other").mkdir()
    convert_folder(tmp_path / "own", tmp_path / "other", form)
    trainer.create_adapter("b", LoraSpec(rank=8 if form == "vllm-3d" else 4, alpha=8 if form == "vllm-3d" else 4))
    if form == "vllm-3d":  # all ranks there are that of gate and up together
        with pytest.raises(CheckpointError, match=r"holds rank 4, scaling 1 for .*experts\.w1"):
            trainer.load("b", tmp_path / "other", optimizer=False)
        return
    trainer.load("b", tmp_path / "other", optimizer=False)
    for tensor, array in trainer.weights("a").items():
        assert np.array_equal(trainer.weights("b")[tensor], array), tensor


def test_tinker_s_own_files(tmp_path: Path) -> None:
    """Files of Tinker name the head differently, name no modules, and have empty tensors for what does not exist."""
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    trainer.create_adapter("a", LoraSpec(rank=4, alpha=6, train_unembed=True, seed=1))
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    trainer.save("a", tmp_path / "own", optimizer=False)
    config = json.loads((tmp_path / "own" / "adapter_config.json").read_text()) | {"target_modules": "all-linear"}
    tensors = load_file(tmp_path / "own" / "adapter_model.safetensors")
    renamed = {name.replace("model.lm_head", "model.model.unembed_tokens"): each for name, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    renamed["base_model.model.model.layers.0.mlp.shared_experts.w1.lora_A.weight"] = torch.zeros(0)
    trainer.create_adapter_from_checkpoint("b", write(tmp_path / "theirs", config, renamed), optimizer=False)
    for name, array in trainer.weights("a").items():
        assert np.array_equal(trainer.weights("b")[name], array), name


EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{EXPERTS}.2.up_proj.lora_B.weight"),
            r"layers\.1\.mlp\.experts\.2\.up_proj\.lora_B.* missing",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.3.up_proj.lora_A.weight": torch.zeros(2, 32)}),
            r"layers\.1\.mlp\.experts\.3\.up_proj\.lora_A\.weight: got \(2, 32\), expected \(4, 32\)",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.w4.lora_A.weight": torch.zeros(1, 4, 32)}),
            r"experts\.w4\.lora_A\.weight: no name of a factor",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.0.up_proj.lora_A.weight": torch.zeros(1, 4, 32)}),
            r"experts\.0\.up_proj\.lora_A\.weight: got 3 dimensions, expected 2",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.w3.lora_A.weight": torch.zeros(1, 4, 32)}),
            r"layers\.1\.mlp\.experts: w3 has tensors of single experts beside tensors of all experts",
        ),
    ],
)
def test_a_file_in_no_form_is_refused(change: object, message: str, tmp_path: Path) -> None:
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own")
    config, tensors = for_vllm(config, tensors)
    change(tensors)
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    with pytest.raises(CheckpointError, match=message):
        trainer.create_adapter_from_checkpoint("b", write(tmp_path / "bad", config, tensors), optimizer=False)
    assert trainer.adapter_ids() == []


@pytest.mark.parametrize("form", ["peft", "vllm", "vllm-3d"])
def test_the_memory_that_a_conversion_takes_is_known_before(form: str, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "own")
    (tmp_path / "other").mkdir()
    convert_folder(tmp_path / "own", tmp_path / "other", form)
    files = [(tmp_path / each / "adapter_model.safetensors").stat().st_size for each in ("own", "other")]
    assert sum(files) < conversion_bytes(tmp_path / "own") < 4 * sum(files)
    assert conversion_bytes(tmp_path / "nothing") == 0


@pytest.mark.parametrize("zero", [("w1",), ("w3",), ("w1", "w3")])
def test_an_alpha_of_zero_leaves_the_others_as_they_are(zero: tuple[str, ...], tmp_path: Path) -> None:
    """PEFT allows it. Gate and up become one projection, with one scaling."""
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own")
    pattern = {rf"experts\.{name}": 0 for name in zero}
    _, got = convert({**config, "alpha_pattern": pattern}, tensors, "vllm-3d")
    for name in zero:
        tensors |= {key: torch.zeros_like(each) for key, each in tensors.items() if f".{name}.lora_B" in key}
    _, wanted = convert(config, tensors, "vllm-3d")
    front = f"{EXPERTS}.base_layer.lora"
    assert got.keys() == wanted.keys()
    for name in got:  # the scaling is multiplied into B
        if not name.startswith(front) or "lora_B" in name:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=0, msg=name)


def test_a_trained_adapter_has_an_alpha_above_zero(tmp_path: Path) -> None:
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own")
    config, tensors = for_vllm(config, tensors)
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    folder = write(tmp_path / "zero", {**config, "lora_alpha": 0}, tensors)
    with pytest.raises(InvalidInputError, match=r"alpha: got 0\.0, allowed: a finite number > 0"):
        trainer.create_adapter_from_checkpoint("b", folder, optimizer=False)


def test_experts_that_share_nothing_do_not_become_an_adapter_that_shares(tmp_path: Path) -> None:
    config, tensors, _ = saved("qwen3_moe", tmp_path / "own", SPECS["independent"])
    trainer = tiny_trainer(tiny_model("qwen3_moe"))
    trainer.create_adapter("b", SPEC)
    with pytest.raises(CheckpointError, match=r"experts\.w\d\.lora_[AB]: experts have different ones.*shared_outer"):
        trainer.load("b", write(tmp_path / "files", *for_vllm(config, tensors)), optimizer=False)
