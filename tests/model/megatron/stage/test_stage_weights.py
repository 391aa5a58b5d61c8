"""Weights reach each process as its cut, without a whole copy, and come back as they were."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.megatron import stage_programs
from tests.model.parallel.process_pool import ProcessPool
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.hub import LocalModel
from twinkle.model.decoder.loading import load_model
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.stage import build_stage
from twinkle.utils.progress import Activity

pytestmark = pytest.mark.megatron

LARGE = LlamaConfig(  # about 110 MiB in fp32
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
)
SMALL = 2.0  # MiB
MESHES: tuple[Mapping[str, Any], ...] = ({"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2, "ep_size": 2})


def same(before: list[torch.Tensor] | None, after: list[torch.Tensor] | None) -> bool:
    assert before is not None, "one process has the head"
    assert after is not None, "one process has the head"
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model, and return its weights as the files have them."""
    stage_programs.make_model(name).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_5", "qwen3_moe"])
def test_weights_come_back_bit_by_bit(tmp_path: Path, two: ProcessPool, name: str) -> None:
    wanted = saved(name, tmp_path)
    for sizes in MESHES:
        if ("ep_size" in sizes and name != "qwen3_moe") or ("tp_size" in sizes and name == "qwen3_5"):
            continue
        for found in two.run(stage_programs.round_trip, tmp_path, sizes):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[each], wanted[each]) for each in wanted)


def test_experts_as_one_tensor_and_one_by_one(tmp_path: Path) -> None:
    weights = saved("qwen3_moe", tmp_path)
    with Activity() as activity:
        before = stage_programs.score(tmp_path, {})
    assert activity.changes >= len(weights)  # others can see how far loading is
    fused: dict[str, torch.Tensor] = {name: each for name, each in weights.items() if ".experts." not in name}
    for layer in (0, 2, 3):  # layer 1 has no experts
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([weights[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}.gate_up_proj": torch.cat([gates, ups], 1), f"{prefix}.down_proj": downs}
    save_file(fused, tmp_path / "model.safetensors")
    after = stage_programs.score(tmp_path, {})
    assert same(before, after)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_loading_takes_one_cut_and_one_tensor(tmp_path: Path, sizes: Mapping[str, Any]) -> None:
    stage_programs.make_model("llama").save_pretrained(tmp_path / "small")
    LlamaForCausalLM(LARGE).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    largest = max(each.nbytes for each in weights.values()) / 2**20
    whole = sum(each.nbytes for each in weights.values()) / 2**20
    pool = ProcessPool(2, ("tests.model.megatron.stage_programs",))  # new processes: used ones have freed memory to use
    try:
        pool.run(stage_programs.loading_memory, tmp_path / "small", sizes)  # imports take memory, too
        measured = pool.run(stage_programs.loading_memory, tmp_path, sizes)
    finally:
        pool.close()
    for rise, cut in measured:
        # The second load in a process; what it takes beside weights (a config, a meta model) is less than a MiB or two.
        assert cut < rise < cut + largest + SMALL < 0.7 * whole, (rise, cut, largest, whole)


@pytest.mark.parametrize("name", ["llama_biases", "llama_tied", "qwen3_moe"])
def test_random_models_are_those_of_one_process(tmp_path: Path, two: ProcessPool, name: str) -> None:
    stage_programs.CONFIGS[name]().save_pretrained(tmp_path)
    model = load_model(LocalModel("random", tmp_path, 7), torch.bfloat16, stage_programs.CPU)
    model.save_pretrained(tmp_path / "whole")
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    for found in two.run(stage_programs.random_weights, tmp_path, 7, {"tp_size": 2}):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[each], wanted[each]) for each in wanted)


def test_files_in_several_parts_and_weights_that_do_not_fit(tmp_path: Path) -> None:
    weights = saved("qwen2", tmp_path)
    before = stage_programs.score(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    after = stage_programs.score(tmp_path, {})
    assert same(before, after)
    rows = weights["lm_head.weight"]
    save_file({**weights, "lm_head.weight": rows[:-1].contiguous()}, tmp_path / places["lm_head.weight"])
    with pytest.raises(
        InvalidInputError, match=r'lm_head\.weight: got "a weight of which .* \(96, 32\)", allowed: \[97, 32\]'
    ):
        stage_programs.score(tmp_path, {})
    del places["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UnsupportedError, match=r"no weight 'model\.norm\.weight'"):
        stage_programs.score(tmp_path, {})


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    stage_programs.CONFIGS["llama"]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="reads safetensors files only"):
        build_stage(LocalModel("test", tmp_path, None), MegatronMesh(), torch.float32, stage_programs.CPU)
