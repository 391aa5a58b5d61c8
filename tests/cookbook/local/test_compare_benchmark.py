"""benchmarks/compare_h200.py: with small programs in place of its parts, and two parts as they are."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
# Reports are written before anything goes wrong, as the real parts do after each row.
OVERHEAD = """
import json, pathlib, sys
row = {"kind": "train", "count": 1, "tokens": 32, "wall_ms": 72.0, "gpu_ms": 16.0, "kernels": 1907}
row["tokens_per_s"] = 444.0
report = {"model": "tiny", "rank": 32, "dtype": "fp32", "repeats": 1}
report |= {"seqs": 2, "length": 16, "prompt": 16, "tokens": 4}
path = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
path.write_text(json.dumps({**report, "rows": [row]}))
"""
TRAINING = "import sys; print('the reason'); sys.exit(3)"
RATES = """
import json, os, pathlib, subprocess, sys, time
given = dict(zip(sys.argv[1:-1], sys.argv[2:]))
path, engine = pathlib.Path(given["--json"]), given["--engine"]
report = {"adapters": 4, "rank": 32, "tokens": 8, "repeats": 1, "path": os.environ.get("PYTHONPATH", "")}
rate = {"torch": 300.0, "vllm": 200.0, "vllm-sampler": 100.0}[engine]
path.write_text(json.dumps({**report, "rows": [{"requests": 4, "tokens_per_s": rate}]}))
if engine == "vllm-sampler":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (path.parent / "child").write_text(str(child.pid))
    time.sleep(600)
"""


@pytest.fixture
def compare(tmp_path: Path):
    """Return a function that runs a copy of the benchmark beside programs that stand for its parts."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("compare_h200.py", "compare_tables.py"):
        shutil.copyfile(BENCHMARKS / name, folder / name)
    for name, text in {"overhead": OVERHEAD, "multi_tenant": TRAINING, "sampler_rates": RATES}.items():
        (folder / f"{name}.py").write_text(text)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, folder / "compare_h200.py", "--json", "out/all.json", "--models", "tiny", *arguments]
        return subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def parts(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out" / "all.json").read_text())["parts"]


def test_a_failed_part_is_reported_and_the_others_go_on(compare, tmp_path: Path) -> None:
    done = compare("--only", "training", "overhead")
    assert done.returncode == 1
    assert "the reason" in done.stdout
    assert "failed: training tiny 2 × 2 × 16" in done.stderr
    found = parts(tmp_path)
    assert [entry["error"] for entry in found["training"]] == ["it ended with exit status 3"]
    assert found["overhead"][0]["error"] is None
    page = (tmp_path / "out" / "all.md").read_text()
    assert "| train 1 tenant × 2 × 16 | 72.0 ms | 16.0 ms | 4.50 | 1 907 | 444 |" in page
    assert "- training tiny 2 × 2 × 16 failed: it ended with exit status 3" in page


def test_a_part_over_its_limit_is_ended_with_its_processes_and_keeps_its_rows(compare, tmp_path: Path) -> None:
    done = compare("--only", "vllm-sampler", "--limit", 3)
    assert done.returncode == 1
    (entry,) = parts(tmp_path)["vllm-sampler"]
    assert entry["error"] == "it took more than 3 s and was ended"
    assert entry["result"]["rows"] == [{"requests": 4, "tokens_per_s": 100.0}]
    child = Path("/proc") / (tmp_path / "out" / "all-parts" / "child").read_text()
    end = time.monotonic() + 120
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2]:
        assert time.monotonic() < end, "a process of the part is still alive"
        time.sleep(0.05)


def test_commands_can_fill_one_file(compare, tmp_path: Path) -> None:
    assert compare("--only", "torch-sampler").returncode == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert compare("--only", "vllm", "torch-sampler", "--add", "--vllm-path", elsewhere).returncode == 0
    found = parts(tmp_path)
    assert [len(found[part]) for part in ("torch-sampler", "vllm")] == [1, 1]
    assert found["vllm"][0]["result"]["path"].split(":")[0] == str(elsewhere)
    assert str(elsewhere) not in found["torch-sampler"][0]["result"]["path"]
    assert "| 4 | 300 |  | 200 | 1.50 |" in (tmp_path / "out" / "all.md").read_text()
    assert compare("--only", "torch-sampler").returncode == 0
    assert list(parts(tmp_path)) == ["torch-sampler"], "without --add the file begins anew"


def test_arguments_are_checked(compare) -> None:
    assert "--repeats: got 0" in compare("--repeats", 0).stderr
    assert "nowhere does not exist" in compare("--vllm-path", "nowhere").stderr


def test_kernels_are_counted_apart_from_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from overhead import DeviceWork, read_trace

    events = [
        {"cat": "kernel", "dur": 1500.0},
        {"cat": "kernel", "dur": 500.0},
        {"cat": "gpu_memcpy", "dur": 100.0},
        {"cat": "gpu_memset", "dur": 50.0},
        {"cat": "cuda_runtime", "dur": 9000.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert read_trace({"traceEvents": events}) == DeviceWork(2.0, 2, 2, 0.15)


@pytest.mark.thorough
def test_parts_run_on_a_small_model(tmp_path: Path) -> None:
    output = tmp_path / "tiny.json"
    command = [sys.executable, BENCHMARKS / "compare_h200.py", "--json", output, "--models", "tiny", "--repeats", "1"]
    command += ["--only", "overhead", "lora-cost"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["parts"]
    (overhead,), (cost,) = (found[part] for part in ("overhead", "lora-cost"))
    assert [row["kind"] for row in overhead["result"]["rows"]] == [
        *["train"] * 2,
        *["step"] * 2,
        *["prompts"] * 2,
        "decode",
    ]
    assert [row["sequences"] for row in cost["result"]["decode_steps"]] == [1, 4]
    assert cost["result"]["rows"][0]["lora_over_base"] > 0
