"""The script that measures training on images runs on a CPU with tiny models."""

import json
import runpy
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "benchmarks" / "vision_training.py"
TINY = ["--model=random://qwen3-vl-tiny", "--text-model=random://qwen3-tiny", "--device=cpu", "--dtype=fp32"]
SMALL = ["--tenants=2", "--images=1", "--text=6", "--repeats=1"]


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *TINY, *SMALL, *options])
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as `python benchmarks/…` does: the scripts share a module
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_counts_what_the_tower_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "--side=64", f"--json={tmp_path / 'report'}")
    found = json.loads((tmp_path / "report").read_text())
    assert (found["tokens"], found["image_tokens"]) == (20, 8)
    assert len(found["rows"]) == 4
    assert all(len(row["steps_s"]) == 1 and row["tokens_per_s"] > 0 for row in found["rows"].values())
    # the tower sees two images once, and in each of four steps two new ones; the same two come back in three steps
    assert (found["images_seen"], found["images_reused"]) == (10, 6)
