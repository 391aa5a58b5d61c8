"""Under torchrun a program needs only a mesh: its models find the other processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model.parallel.full_programs import save_model, train_full, train_multi_lora
from tests.model.parallel.test_parallel_lora import assert_close
from tests.support.paths import ROOT


@pytest.mark.parallel
def test_a_program_under_torchrun(tmp_path: Path) -> None:
    model, found = save_model("toy", str(tmp_path / "model")), tmp_path / "weights.pt"
    program = "tests.model.parallel.torchrun_program"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run([*launch, program, model, str(found)], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    alone = train_full({}, model)["weights"] | train_multi_lora({}, model)["a"]["weights"]
    assert_close({name: tensor.numpy() for name, tensor in torch.load(found).items()}, alone)
