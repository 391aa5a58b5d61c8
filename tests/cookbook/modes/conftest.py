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
    environment = {**os.environ, "TWINKLE_MODEL": str(model), "OMP_NUM_THREADS": "1"}
    environment |= {"TWINKLE_CPU_PG_CPUS_PER_PROC": "0.25", "PYTHONPATH": str(PROGRAM.parents[2] / "src")}

    def run(way: str, *scripts: str) -> Path:
        output = tmp_path_factory.mktemp(way)
        launch = TORCHRUN if way == "torchrun" else [sys.executable]
        mode = "ray" if way == "ray" else "local"
        command = [*launch, str(PROGRAM), mode, str(output), *scripts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-5000:]
        return output

    return run
