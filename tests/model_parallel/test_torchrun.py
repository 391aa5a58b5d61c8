"""Under torchrun a mesh is all that a program needs: its models find the other processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_programs import save_model, train_full, train_multi_lora
from test_parallel_lora import assert_close


@pytest.mark.parallel
def test_a_program_under_torchrun(tmp_path: Path) -> None:
    model, found = save_model("toy", str(tmp_path / "model")), tmp_path / "weights.pt"
    program = Path(__file__).with_name("torchrun_program.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(program), model, str(found)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    alone = train_full({}, model)["weights"] | train_multi_lora({}, model)["a"]["weights"]
    assert_close({name: tensor.numpy() for name, tensor in torch.load(found).items()}, alone)
