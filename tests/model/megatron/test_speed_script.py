"""The script that compares the speed of the two backends runs on a CPU with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.megatron


def test_the_script_compares_both_backends(tmp_path: Path) -> None:
    script, report = ROOT / "benchmarks" / "megatron_speed.py", tmp_path / "report.json"
    options = ["--tenants", "2", "--len", "16", "--repeats", "2", "--no-compiled", "--json", str(report)]
    command = [sys.executable, str(script), *options, "--model", "random://llama-tiny", "--device", "cpu"]
    done = subprocess.run([*command, "--dtype", "fp32"], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["rows"].keys() == {"transformers eager", "megatron eager"}
    assert all(len(row["steps_s"]) == 2 and row["tokens_per_s"] > 0 for row in found["rows"].values())
    assert found["megatron_over_transformers"].keys() == {"eager"}
    assert "megatron over transformers, eager:" in done.stdout
