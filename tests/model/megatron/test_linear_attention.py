"""Qwen3.5: its checkpoints, also those with a vision tower, its files on meshes and elsewhere, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
)

from tests.model.megatron import failure_programs, library_programs, stage_programs, trainer_programs
from tests.model.megatron.library.test_library_models import check_scores
from tests.model.megatron.test_trainer_failures import assert_same_state
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import assert_numbers_close
from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model.adapters.linear_attention_forms import has_parts
from twinkle.model.decoder.loading import load_model
from twinkle.model.megatron.config import check_sizes, read_rope, read_shape
from twinkle.model.megatron.library.model import MegatronModel
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.sizes import MeshSizes
from twinkle.model.megatron.stage import build_stage
from twinkle.model.types import text_name

pytestmark = pytest.mark.megatron

Sizes = Mapping[str, Any]
PP2: Sizes = {"pp_size": 2}
DP2: Sizes = {"dp_size": 2}
TINY_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5")
    trainer_programs.make_model("qwen3_5").save_pretrained(made)
    return made


def with_tower(tied: bool) -> Qwen3_5ForConditionalGeneration:
    """Return a model with a vision tower, with the weights of the text model beside them."""
    text = stage_programs.make_model("qwen3_5_tied" if tied else "qwen3_5")
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=TINY_TOWER, tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_checkpoint_with_a_tower_is_read_for_text(tmp_path: Path, two: ProcessPool, tied: bool) -> None:
    with_tower(tied).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("model.language_model.layers.") for name in names)
    assert any(name.startswith("model.visual.") for name in names)
    model = stage_programs.make_model("qwen3_5_tied" if tied else "qwen3_5")
    with torch.no_grad():
        wanted = [model(each[None]).logits[0].log_softmax(-1) for each in stage_programs.make_tokens()]
    first, last = two.run(stage_programs.score, tmp_path, PP2)
    assert first is None
    torch.testing.assert_close(last, wanted, rtol=1e-5, atol=1e-5)
    kept = {name: each for name, each in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    for found in two.run(stage_programs.round_trip, tmp_path, PP2):
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], kept[name]) for name in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("images", [True, False], ids=["tower", "text"])
def test_random_models_are_those_of_one_process(images: bool, dtype: torch.dtype) -> None:
    """With a tower, the decoder's numbers are drawn behind those of the tower."""
    local = hub.resolve("random://qwen3.5-tiny?seed=7")
    model = load_model(local, dtype, stage_programs.CPU, images=images)
    assert images == any(name.startswith("model.visual.") for name, _ in model.named_parameters())
    wanted = {text_name(name): each for name, each in model.named_parameters() if "visual" not in name}
    stage = build_stage(local, MegatronMesh(), dtype, stage_programs.CPU, images=images)
    found = stage_programs.whole_weights(stage)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("sizes", [PP2, DP2], ids=["pp2", "dp2"])
def test_checkpoints_move_between_a_mesh_and_one_process(
    folder: Path, two: ProcessPool, tmp_path: Path, sizes: Sizes
) -> None:
    """Also to a process that has loaded the model with its tower, and so by other names."""
    requests = trainer_programs.make_calls(trainer_programs.make_model("qwen3_5"), "qwen3_5")[0]
    pool, seeing = two.on(sizes), tmp_path / "seeing"
    trained = pool.run(failure_programs.save_trained, folder, "qwen3_5", sizes, requests, tmp_path / "mesh")
    alone = failure_programs.load_saved(folder, "qwen3_5", {}, tmp_path / "mesh", tmp_path / "alone")
    back = pool.run(failure_programs.load_saved, folder, "qwen3_5", sizes, tmp_path / "alone", tmp_path / "back")
    for states in (*trained, *back):
        assert states.keys() == alone.keys()
        for name, state in states.items():
            assert_same_state(state, alone[name])
    files = sorted((tmp_path / "mesh").rglob("*.safetensors"))
    assert any(has_parts(load_file(path)) for path in files), "query, key and value are trained apart"
    for path in files:
        relative = path.relative_to(tmp_path / "mesh")
        assert path.read_bytes() == (tmp_path / "alone" / relative).read_bytes()
        assert path.read_bytes() == (tmp_path / "back" / relative).read_bytes()
    with_tower(False).save_pretrained(seeing)
    there = pool.run(failure_programs.load_saved, seeing, "qwen3_5", sizes, tmp_path / "mesh", tmp_path / "there")
    for states in there:
        for name, state in states.items():
            assert_same_state(state, alone[name])


def test_a_random_model_trains_like_that_of_the_transformers_trainer(two: ProcessPool) -> None:
    """The Transformers trainer has the vision tower, with the same decoder."""
    alone = failure_programs.random_model({}, "random://qwen3.5-tiny?seed=3")
    for each in two.on(PP2).run(failure_programs.random_model, PP2, "random://qwen3.5-tiny?seed=3"):
        assert_numbers_close(each, alone)


# --- the library's models ---------------------------------------------------------------------------------------------


def test_merged_folders_load_in_transformers(folder: Path, two: ProcessPool, tmp_path: Path) -> None:
    saved = two.run(library_programs.save, folder, PP2, tmp_path / "plain")[0]
    check_scores(AutoModelForCausalLM.from_pretrained(saved["merged"]), saved["scores"]["second"])
    with_tower(False).save_pretrained(tmp_path / "seeing")
    merged = two.run(library_programs.save, tmp_path / "seeing", PP2, tmp_path / "text")[0]["merged"]
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.config.architectures == ["Qwen3_5ForCausalLM"]
    check_scores(model, saved["scores"]["second"])


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "adapter"])
def test_a_sampler_draws_with_the_weights_of_all_stages(folder: Path, two: ProcessPool, merge: bool) -> None:
    for found in two.run(library_programs.synchronised, folder, PP2, merge):
        assert max(found) < 2e-5


# --- what is refused --------------------------------------------------------------------------------------------------


def test_tensor_parallelism_is_refused_with_a_mesh_that_works(two: ProcessPool, folder: Path) -> None:
    shape = read_shape(stage_programs.CONFIGS["qwen3_5"]())
    text = (
        "tp_size: got 2, allowed: 1: qwen3_5 has layers with linear attention, which are not cut; the nearest mesh "
        "that works: dp_size=4, tp_size=1, pp_size=2"
    )
    with pytest.raises(InvalidInputError) as refused:
        check_sizes(shape, MeshSizes(dp=2, tp=2, pp=2))
    assert str(refused.value) == text
    for found in two.run(stage_programs.refusal, {"tp_size": 2}, "qwen3_5"):
        assert found.startswith("InvalidInputError: tp_size: got 2, allowed: 1: qwen3_5 has layers with linear")
    with pytest.raises(InvalidInputError, match="pp_size: got 3, allowed: 1 or 2 or 4, which divide its 4 layers"):
        check_sizes(shape, MeshSizes(pp=3))
    with pytest.raises(InvalidInputError, match="ep_size: got 2, allowed: 1: qwen3_5 has no experts"):
        check_sizes(shape, MeshSizes(dp=2, ep=2))


@pytest.mark.parametrize(
    ("config", "family"),
    [(Qwen3_5MoeTextConfig(), "qwen3_5_moe"), (Qwen3_5MoeConfig(), "qwen3_5_moe"), (GptOssConfig(), "gpt_oss")],
)
def test_families_that_are_not_here(config: PreTrainedConfig, family: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{family}: the Megatron backend supports .* qwen3_5, qwen3_moe$"):
        read_shape(config)


def test_layers_and_options_that_are_not_here() -> None:
    config = stage_programs.CONFIGS["qwen3_5"]()
    with pytest.raises(
        UnsupportedError, match=r"layer_types: got \['sliding_attention'\], allowed: full_attention and"
    ):
        read_shape(_changed(config, layer_types=["full_attention", "sliding_attention"] * 2))
    with pytest.raises(UnsupportedError, match="hidden_act: got 'gelu', linear attention is known with 'silu' only"):
        read_shape(_changed(config, hidden_act="gelu"))
    quantized = Qwen3_5Config(text_config=config.to_dict(), quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match="qwen3_5: its weights are quantized"):
        read_shape(quantized)
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match="rotary embeddings of a part of each head"):
        read_rope(_changed(stage_programs.CONFIGS["llama"](), rope_parameters=partial))


def _changed(config: PreTrainedConfig, **values: object) -> PreTrainedConfig:
    for name, value in values.items():
        setattr(config, name, value)
    return config


def test_images_are_refused_by_name(tmp_path: Path) -> None:
    with_tower(False).save_pretrained(tmp_path)
    model = MegatronModel(tmp_path, device="cpu", mixed_precision="no")
    row = {"input_ids": [1, 2, 3], "labels": [2, 3, 4], "pixel_values": np.zeros((4, 1536), np.float32)}
    with pytest.raises(UnsupportedError, match=r"inputs\[0\]\.pixel_values: the Megatron backend reads text only"):
        model.forward_only(inputs=[row])
