"""Checkpoints in mxfp4 load to the values of Transformers' own conversion, with little memory beside the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.mxfp4_writer import quantized, save_mxfp4
from tests.support.models.peak_memory import RETURNING_FREED_MEMORY
from tests.support.models.reference import assert_logprobs_close, random_datum
from tests.support.models.tiny_models import random_model, the_result, tiny_config
from tests.support.paths import ROOT
from twinkle import hub
from twinkle.errors import CheckpointError, InvalidInputError
from twinkle.model import LoraSpec, Trainer, TrainItem, TransformersModel
from twinkle.model.decoder.experts.mxfp4 import dequantized
from twinkle.model.decoder.loading import load_model
from twinkle.model.transformers.loading import load_for_training
from twinkle.utils.progress import Activity


def make(hidden: int = 64, width: int = 32, **values: object) -> PreTrainedModel:
    config = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **values}
    return random_model(tiny_config("GptOssConfig", hidden_size=hidden, intermediate_size=width, **config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_values_and_scales(dtype: torch.dtype) -> None:
    """Every byte of a block, and scales from the smallest on, bit by bit as in Transformers."""
    torch.manual_seed(0)
    blocks = torch.randperm(256).to(torch.uint8).repeat(12).view(1, 6, 32, 16)
    scales = torch.randint(0, 250, (1, 6, 32)).to(torch.uint8)
    scales[0, 0] = torch.arange(32)
    ours = dequantized(blocks[0], scales[0], dtype)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0]
    assert ours.shape == theirs.shape == (1024, 6)
    whole = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.contiguous().view(whole), theirs.view(whole))


def test_a_checkpoint_has_the_values_of_transformers(tmp_path: Path) -> None:
    model = make()
    folder = save_mxfp4(model, tmp_path / "packed")
    files = load_file(folder / "model.safetensors")
    loaded = load_model(hub.resolve(str(folder)), torch.bfloat16, torch.device("cpu"))
    weights = dict(loaded.named_parameters())
    for name, tensor in model.named_parameters():
        if name.endswith((".gate_up_proj", ".down_proj")):
            expected = convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"])
            assert (expected - tensor).abs().max() < 0.3 * tensor.abs().max()  # the writer does what it should
        else:
            expected = files[name]
        assert torch.equal(weights[name], expected), name
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer), name
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.get_parameter("model.layers.0.self_attn.sinks").dtype == torch.bfloat16


def test_it_trains_as_the_same_weights_in_full(tmp_path: Path) -> None:
    model = make()
    folder = save_mxfp4(model, tmp_path / "packed")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            packed = name.endswith((".gate_up_proj", ".down_proj"))
            parameter.copy_(convert_moe_packed_tensors(*quantized(parameter)) if packed else parameter.bfloat16())
    model.save_pretrained(tmp_path / "full")
    item = TrainItem("a", [random_datum(model, "cross_entropy", 20, seed=1)])
    results = []
    for each in (folder, tmp_path / "full"):
        trainer = Trainer.from_pretrained(str(each), device="cpu", dtype="fp32")
        trainer.create_adapter("a", LoraSpec(4, seed=1))
        results.append(the_result(trainer.forward_backward([item])[0]).logprobs)
    assert_logprobs_close(*results)
    library = TransformersModel(model_id=str(folder)).model
    assert torch.equal(library.get_parameter("lm_head.weight"), model.lm_head.weight)
    assert all(parameter.requires_grad for parameter in library.parameters())  # without adapters, all of them train


def test_the_library_takes_a_dtype_by_name_and_a_class(tmp_path: Path) -> None:
    """The loader is asked with the same options as ``from_pretrained``, whose place it takes."""
    folder, cpu = str(save_mxfp4(make(), tmp_path / "packed")), torch.device("cpu")
    for given in ("bfloat16", "auto"):
        with Activity() as activity:
            model = load_for_training(folder, None, None, cpu, {"dtype": given})
        assert model.dtype == torch.bfloat16
        assert activity.changes >= len(list(model.parameters()))  # others can see how far it is
    with pytest.raises(InvalidInputError, match=r"dtype: got 'bf8'.* \"auto\""):
        load_for_training(folder, None, None, cpu, {"dtype": "bf8"})
    assert type(load_for_training(folder, "GptOssForCausalLM", None, cpu, {})) is GptOssForCausalLM
    with pytest.raises(CheckpointError, match=r"lack 1 weights, among them \['score\.weight'\]"):
        load_for_training(folder, "GptOssForSequenceClassification", None, cpu, {})


def test_beside_the_model_there_is_one_expert_in_memory(tmp_path: Path) -> None:
    """One parameter of the experts has 24 MiB; dequantising it as a whole would take several times as much."""
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=24,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    folder = save_mxfp4(random_model(config), tmp_path / "packed")
    command = [sys.executable, "-m", "tests.support.models.mxfp4_memory", folder]
    environment = {**os.environ, **RETURNING_FREED_MEMORY}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    file = (folder / "model.safetensors").stat().st_size / 2**20  # its pages count while it is read
    assert found["size"] > 36
    # The least of three: pages of files that the kernel drops meanwhile stay in the peak.
    assert min(found["rises"]) < found["size"] + file + 24, (found, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop("model.norm.weight"), r"lack 1 weights, among them \['model\.norm\.weight'\]"),
        (lambda files: files.pop("model.layers.0.mlp.experts.down_proj_scales"), r"layers\.0\.mlp\.experts\.down_proj"),
        (
            lambda files: files.update({"model.norm.weight": torch.zeros(3)}),
            r"model\.norm\.weight: got \(3,\), expected \(64,\)",
        ),
    ],
)
def test_what_is_wrong_with_the_files(change: object, message: str, tmp_path: Path) -> None:
    folder = save_mxfp4(make(), tmp_path / "packed")
    files = load_file(folder / "model.safetensors")
    change(files)
    save_file(files, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(hub.resolve(str(folder)), torch.float32, torch.device("cpu"))
