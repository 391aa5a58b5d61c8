"""The scripts of cookbook/megatron in four CPU processes, TP 2 × PP 2: the losses of the same model in one process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, Qwen3MoeConfig

from tests.support.paths import ROOT, SOURCE
from twinkle import hub

pytestmark = pytest.mark.megatron

SETTINGS = ["--epochs", "2", "--batch-size", "16", "--precision", "fp32"]
TINY_EXPERTS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def _write_model(folder: Path, config: PretrainedConfig, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model for each script."""
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; `make test-megatron` does that")
    shape, folder = hub.resolve("random://llama-tiny").path, tmp_path_factory.mktemp("models")
    tokenizer, config = AutoTokenizer.from_pretrained(shape), AutoConfig.from_pretrained(shape)
    experts = Qwen3MoeConfig(vocab_size=config.vocab_size, max_position_embeddings=512, **TINY_EXPERTS)
    return {
        "tp": _write_model(folder / "dense", config, tokenizer),
        "tp_moe": _write_model(folder / "experts", experts, tokenizer),
    }


def _run(script: str, model: Path, output: Path, processes: int, *arguments: str) -> dict[str, Any]:
    """Run a script under torchrun, and return its losses."""
    curve = output / f"{script}-{processes}.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launch, str(ROOT / "cookbook/megatron" / f"{script}.py"), *SETTINGS, *arguments]
    command += ["--curve", str(curve), "--output", str(output / str(processes))]
    variables = {**os.environ, "TWINKLE_MODEL": str(model), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "held-out loss: " in done.stdout
    return dict(json.loads(curve.read_text()))


def _assert_same_training(four: dict[str, Any], one: dict[str, Any]) -> None:
    """Losses are rounded to four digits. Adam magnifies differences in the order of sums."""
    assert len(four["train"]) == len(one["train"]) == 6  # 40 rows, 16 a step, twice
    assert four["train"] == pytest.approx(one["train"], abs=1.5e-4)
    assert four["held_out"] == pytest.approx(one["held_out"], abs=1.5e-4)
    assert four["held_out"][1] < four["held_out"][0]


def test_tp(models: dict[str, Path], tmp_path: Path) -> None:
    """The checkpoint of four processes goes on in one, and equals the checkpoint of one process."""
    four = _run("tp", models["tp"], tmp_path, 4)
    one = _run("tp", models["tp"], tmp_path, 1, "--tp-size", "1", "--pp-size", "1")
    _assert_same_training(four, one)
    found, wanted = (load_file(tmp_path / n / "megatron_tp/adapter_model.safetensors") for n in ("4", "1"))
    assert found.keys() == wanted.keys()
    assert all((found[name] - wanted[name]).norm() <= 1e-3 * wanted[name].norm() for name in wanted)
    saved = tmp_path / "4" / "megatron_tp"
    resumed = _run("tp", models["tp"], tmp_path, 1, "--tp-size", "1", "--pp-size", "1", "--resume", str(saved))
    assert resumed["held_out"][0] == pytest.approx(four["held_out"][1], abs=1.5e-4)


def test_tp_moe(models: dict[str, Path], tmp_path: Path) -> None:
    """Both processes of a stage hold two of four experts. What is saved is a model that Transformers loads."""
    four = _run("tp_moe", models["tp_moe"], tmp_path, 4, "--experts")
    sizes = ("--tp-size", "1", "--pp-size", "1", "--ep-size", "1")
    one = _run("tp_moe", models["tp_moe"], tmp_path, 1, "--experts", *sizes)
    _assert_same_training(four, one)
    merged, alone = (AutoModelForCausalLM.from_pretrained(tmp_path / n / "megatron_tp_moe") for n in ("4", "1"))
    assert not isinstance(merged, peft.PeftModel)
    base = AutoModelForCausalLM.from_pretrained(models["tp_moe"], dtype=torch.float32).state_dict()
    changed = set()
    for (name, tensor), wanted in zip(merged.state_dict().items(), alone.state_dict().values(), strict=True):
        assert (tensor - wanted).norm() <= 1e-3 * wanted.norm(), name
        if not torch.equal(tensor, base[name]):
            changed.add(name.rpartition(".layers.")[2].partition(".")[2])
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert changed == experts | {f"self_attn.{part}_proj.weight" for part in "qkvo"}
