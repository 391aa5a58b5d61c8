"""The script that measures adapters on experts runs on a CPU with a tiny model."""

import json
import runpy
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "benchmarks" / "experts.py"
SMALL = ["--model=random://qwen3-moe-tiny", "--device=cpu", "--dtype=fp32", "--tenants=2", "--seqs=1", "--len=8"]
FEW = ["--ranks", "8", "16", "--requests", "2", "--adapters=2", "--decode-rank=8", "--draw=2", "--repeats=1"]


def test_the_script_writes_all_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *SMALL, *FEW, f"--json={tmp_path / 'report'}"])
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as `python benchmarks/…` does: the scripts share a module
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = json.loads((tmp_path / "report").read_text())
    assert [table["rank"] for table in found["training"]] == [8, 16]
    for table in found["training"]:
        assert table["tokens"] == 16
        assert set(table["rows"]) == {"fused", "ideal", "one tenant", "optim steps"}
        assert all(len(row["all_seconds"]) == 1 and row["seconds"] > 0 for row in table["rows"].values())
        assert table["fused_over_ideal"] > 0
    (row,) = found["decoding"]
    assert row["requests"] == 2
    assert not row["captured"]
    assert all(rate > 0 for rate in row["tokens_per_s"].values())
