"""A fixture that runs cookbook scripts on a small model in separate processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from twinkle import hub

PROGRAM = Path(__file__).with_name("script_program.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

GRADIENTS = PROGRAM.with_name("gradient_program.py")

Run = Callable[..., Path]


@pytest.fixture(scope="session")
def run_scripts(tmp_path_factory) -> Run:
    """``run_scripts(way, *scripts)`` runs scripts and returns the folder with their output.

    The way is local, torchrun or ray.
    """
    shape, model = hub.resolve("random://llama-tiny").path, tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape)).save_pretrained(model)
    AutoTokenizer.from_pretrained(shape).save_pretrained(model)
    environment = _environment(model)

    def run(way: str, *scripts: str) -> Path:
        output = tmp_path_factory.mktemp(way)
        launch = TORCHRUN if way == "torchrun" else [sys.executable]
        mode = "ray" if way == "ray" else "local"
        command = [*launch, str(PROGRAM), mode, str(output), *scripts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-5000:]
        return output

    return run


@pytest.fixture(scope="session")
def run_for_gradients(tmp_path_factory) -> Callable[..., dict]:
    """``run_for_gradients(way, script, *arguments)`` returns the losses and gradients of a run, local or torchrun."""
    shape, model = hub.resolve("random://llama-tiny").path, tmp_path_factory.mktemp("few_heads")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    config.update({"hidden_size": 96, "head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1})
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(shape).save_pretrained(model)

    def run(way: str, script: str, *arguments: str) -> dict:
        output = tmp_path_factory.mktemp(way)
        launch = TORCHRUN if way == "torchrun" else [sys.executable]
        command = [*launch, str(GRADIENTS), str(output / "found.pt"), script, *arguments, "--output", str(output)]
        done = subprocess.run(command, env=_environment(model), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-5000:]
        return torch.load(output / "found.pt")

    return run


def _environment(model: Path) -> dict[str, str]:
    return {
        **os.environ,
        "TWINKLE_MODEL": str(model),
        "OMP_NUM_THREADS": "1",
        "TWINKLE_CPU_PG_CPUS_PER_PROC": "0.25",
        "PYTHONPATH": str(PROGRAM.parents[3] / "src"),
    }
