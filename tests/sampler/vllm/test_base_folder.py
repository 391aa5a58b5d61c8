"""The base model that vLLM reads. These tests need no vLLM."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models.mxfp4_writer import save_mxfp4
from twinkle import hub
from twinkle.errors import UnsupportedError
from twinkle.model import Trainer
from twinkle.model.decoder.base_weights import named_weights
from twinkle.model.decoder.loading import load_model
from twinkle.sampler.vllm import base_folder as module


def tiny(model_id: str = "random://llama-tiny") -> Trainer:
    return Trainer.from_pretrained(model_id, device="cpu", dtype="fp32", memory_budget_bytes=2**30)


@pytest.mark.parametrize("room", ["enough", "too little"])
@pytest.mark.parametrize("file_bytes", [2**30, 2**15])
def test_random_weights_are_the_trainers_own(
    room: str, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads the numbers that the trainer computes with, however they were drawn."""
    trainer = tiny()
    with torch.no_grad():
        for parameter in named_weights(trainer.base).values():
            parameter.add_(0.25)  # as if another device had drawn them
    monkeypatch.setattr(module, "_FILE_BYTES", file_bytes)
    if room == "too little":
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    with module.base_folder(trainer, tmp_path) as folder:
        (weights_at,) = {file.resolve().parent.parent for file in folder.glob("*.safetensors")}
        assert (weights_at == tmp_path) == (room == "enough")
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (file_bytes < 2**30)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = named_weights(loaded)
        for name, parameter in named_weights(trainer.base).items():
            torch.testing.assert_close(weights[name], parameter, rtol=0, atol=0)
    assert not list(folder.glob("*.safetensors*"))
    assert not list(tmp_path.glob("base-weights-*"))
    assert AutoTokenizer.from_pretrained(folder).vocab_size  # vLLM may read what is beside the weights at any time


DECODER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
ONE_BY_ONE = ["qwen3-moe-tiny", "mixtral-tiny", "olmoe-tiny", "deepseek-v3-tiny"]  # experts in files
OTHERS = ["gpt-oss-tiny", "qwen3-vl-tiny", "qwen3-vl-moe-tiny", "qwen3.5-tiny", "qwen3.5-moe-tiny"]


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*ONE_BY_ONE, *OTHERS])
def test_files_have_the_weights_that_transformers_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, Transformers has all experts in one tensor. vLLM knows them one by one, as in files.

    The files of Qwen3-VL's experts have inputs before outputs. Transformers reads both orders, but writes its own, and
    cannot tell them apart where both sizes are equal.
    """
    monkeypatch.setattr(module, "_FILE_BYTES", 2**15)
    model = load_model(hub.resolve(f"random://{name}"), torch.float32, torch.device("cpu"), images=True)
    model.save_pretrained(tmp_path / "theirs")
    theirs = contents(tmp_path / "theirs")
    with module.base_folder(tiny(f"random://{name}"), tmp_path) as folder:
        ours = contents(folder)
        files = [load_file(file).keys() for file in folder.glob("*.safetensors")]
        loaded = type(model).from_pretrained(folder, dtype=torch.float32)
    decoders = [{int(found[1]) for name in each if (found := DECODER.match(name))} for each in files]
    assert sum(map(len, decoders)) == len(set().union(*decoders)) > 1  # a layer is in one file
    assert ours.keys() == theirs.keys()
    turned = {weight for weight in ours if ".experts." in weight and name == "qwen3-vl-moe-tiny"}
    for weight, tensor in ours.items():
        assert torch.equal(tensor, theirs[weight].mT if weight in turned else theirs[weight]), weight
    own = named_weights(model)
    assert name in OTHERS or any(".experts.3." in weight for weight in theirs)
    for weight, tensor in named_weights(loaded).items():
        square = weight in turned and tensor.shape[1] == tensor.shape[2]
        assert torch.equal(tensor, own[weight].mT if square else own[weight]), weight
    assert len(turned) == (4 if name == "qwen3-vl-moe-tiny" else 0)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_other_models_are_read_where_they_are(tmp_path: Path) -> None:
    model = load_model(hub.resolve("random://llama-tiny"), torch.float32, torch.device("cpu"))
    model.save_pretrained(tmp_path / "model")
    with module.base_folder(tiny(str(tmp_path / "model")), tmp_path) as folder:
        assert folder == tmp_path / "model"
    assert folder.is_dir()


def test_gpt_oss_on_a_cpu_and_in_mxfp4_is_refused_by_name(tmp_path: Path) -> None:
    trainer = tiny("random://gpt-oss-tiny")
    with pytest.raises(UnsupportedError, match=r"sampler_type: got 'vllm' for gpt_oss on a CPU, allowed: 'torch'"):
        module.require_served(trainer, adapters=True)
    model = load_model(hub.resolve("random://gpt-oss-tiny"), torch.float32, torch.device("cpu"))
    folder = save_mxfp4(model, tmp_path / "packed")
    cuda, half = torch.device("cuda"), torch.bfloat16
    elsewhere = SimpleNamespace(architecture=trainer.architecture, device=cuda, dtype=half, model_id=str(folder))
    with pytest.raises(UnsupportedError, match=r"model_id: .* mxfp4, allowed: one in bf16"):
        module.require_served(elsewhere, adapters=True)
    module.require_served(elsewhere, adapters=False)
    elsewhere.model_id = "random://gpt-oss-tiny"
    module.require_served(elsewhere, adapters=True)


def test_adapters_in_fp32_are_refused_on_a_gpu() -> None:
    trainer = tiny()
    module.require_served(trainer, adapters=True)
    elsewhere = SimpleNamespace(architecture=trainer.architecture, device=torch.device("cuda"), dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"dtype: got fp32 .* allowed: bf16"):
        module.require_served(elsewhere, adapters=True)
    module.require_served(elsewhere, adapters=False)
