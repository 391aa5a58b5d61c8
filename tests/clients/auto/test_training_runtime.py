"""What a training script records about itself, and what SIGTERM does to it."""

import json
import math
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.paths import SOURCE
from twinkle_client.auto.runtime import TrainingRuntime
from twinkle_client.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def no_run(monkeypatch):
    monkeypatch.delenv("TWINKLE_RUN_ID", raising=False)


def test_a_run_has_a_folder(tmp_path, monkeypatch):
    runtime = TrainingRuntime("lr-3e-4", tmp_path)
    assert runtime.directory.parent == tmp_path
    assert runtime.run_id.startswith("lr-3e-4_20")
    again = TrainingRuntime(runtime.run_id, tmp_path)  # by its full name the run goes on
    assert again.directory == runtime.directory
    monkeypatch.setenv("TWINKLE_RUN_ID", runtime.run_id)
    assert TrainingRuntime(base_dir=tmp_path).run_id == runtime.run_id
    monkeypatch.delenv("TWINKLE_RUN_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TrainingRuntime().directory.parent == tmp_path / ".cache/twinkle"


@pytest.mark.parametrize("name", ["../etc", "a/b", "-r", ".", "a b", "x" * 200])
def test_names_that_are_no_folders_are_refused(tmp_path, name):
    with pytest.raises(InvalidRequestError, match=r"run_id: got .*, allowed: letters, digits"):
        TrainingRuntime(name, tmp_path)


def test_the_record_of_a_run(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("print(1)\n")
    runtime = TrainingRuntime("r", tmp_path)
    runtime.start("Qwen/Qwen3-0.6B", {"lr": 1e-4}, script)
    assert (runtime.directory / "train.py").read_text() == "print(1)\n"
    meta = json.loads((runtime.directory / "meta.json").read_text())
    assert {key: meta[key] for key in ("run_id", "model_id", "config", "status")} == {
        "run_id": runtime.run_id,
        "model_id": "Qwen/Qwen3-0.6B",
        "config": {"lr": 1e-4},
        "status": "running",
    }
    assert runtime.get_resume_info() == {"last_step": 0}
    before = time.time()
    runtime.log_metrics(loss=0.5, grad_norm=math.nan)
    runtime.log_metrics(loss=0.25)
    lines = [json.loads(line) for line in (runtime.directory / "metrics.jsonl").read_text().splitlines()]
    assert before <= lines[0].pop("ts") <= time.time()
    assert lines[0] == {"loss": 0.5, "grad_norm": None}
    assert runtime.get_resume_info() == {"last_step": 2}  # no step in the metrics: lines are counted
    runtime.log_metrics(step=17, loss=0.1)
    with (runtime.directory / "metrics.jsonl").open("a") as file:
        file.write('{"ts": 1, "step": 18')  # killed while it wrote
    assert runtime.get_resume_info() == {"last_step": 17}
    runtime.log("half way")
    assert (runtime.directory / "output.log").read_text().endswith("] half way\n")
    runtime.finish("completed")
    meta = json.loads((runtime.directory / "meta.json").read_text())
    assert (meta["status"], meta["model_id"]) == ("completed", "Qwen/Qwen3-0.6B")
    with pytest.raises(InvalidRequestError, match="loss: got 'low', allowed: a number"):
        runtime.log_metrics(loss="low")


SCRIPT = """
    import json, sys, time
    from twinkle_client.auto.runtime import TrainingRuntime

    class Model:
        def save(self, name, **options):
            print(json.dumps([name, options]))
            return f"twinkle://r/weights/{name}"

    class Loader:
        def get_state(self):
            return {"consumed_train_samples": 24}

    runtime = TrainingRuntime("r", sys.argv[1])
    runtime.start("m", {}, __file__)
    runtime.register_graceful_shutdown(Model(), Loader(), "stopped-here")
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


def test_sigterm_saves_a_checkpoint(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    variables = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen([sys.executable, script, tmp_path], stdout=subprocess.PIPE, text=True, env=variables)
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    rest, _ = child.communicate(timeout=120)
    assert child.returncode == 143
    assert json.loads(rest) == ["stopped-here", {"save_optimizer": True, "consumed_train_samples": 24}]
    (folder,) = tmp_path.glob("r_*")
    assert json.loads((folder / "meta.json").read_text())["status"] == "stopped"
    assert "checkpoint twinkle://r/weights/stopped-here" in (folder / "output.log").read_text()
