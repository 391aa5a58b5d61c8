"""Run the scripts for Ray, all on one cluster, and read what they recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from tests.dropin.support.client_runs import DROPIN, SUPPORT
from tests.dropin.support.local_runs import COMMON, LocalRun, read_calls
from tests.support.paths import SOURCE

FULL_RATE = 1e-3  # all parameters change less than an adapter does
_GROUPS = ("--strategy", "native_fsdp", "--model-gpus", "1", "--log-interval", "1")
_ROLLOUTS = (
    *_GROUPS,
    *("--sampler-gpus", "1", "--batch-size", "2", "--num-generations", "4", "--max-tokens", "12"),
    *("--max-model-len", "2048", "--micro-batch-size", "2"),
)
# Command lines of the scripts. lora_dropout is 0, because its masks could not be compared with another run's; only
# ppo.py has a dropout of its own.
ARGUMENTS: dict[str, list[str]] = {
    "dpo_lora": [
        *COMMON,
        *("--strategy", "native_fsdp", "--model-gpus", "2", "--batch-size", "4", "--max-steps", "3"),
        *("--save-steps", "2"),
    ],
    "dpo_full": [
        *COMMON,
        *_GROUPS,
        *("--ref-model-gpus", "1", "--batch-size", "4", "--max-steps", "3", "--save-steps", "2"),
        *("--learning-rate", str(FULL_RATE)),
    ],
    "grpo": [*COMMON, *_ROLLOUTS, "--mini-batch-size", "4", "--max-steps", "4", "--save-steps", "3"],
    "short_math_grpo": [*COMMON, *_ROLLOUTS, "--mini-batch-size", "3", "--max-steps", "6"],
    "multi_turn_grpo": [*COMMON, *_ROLLOUTS, "--max-tokens", "24", "--mini-batch-size", "3", "--max-steps", "6"],
    "ppo": [
        *COMMON,
        *_ROLLOUTS,
        *("--critic-model-gpus", "1", "--mini-batch-size", "4", "--num-train-epochs", "2", "--max-steps", "2"),
        *("--kl-coef", "0.1", "--gae-lambda", "0.9", "--critic-learning-rate", str(FULL_RATE), "--save-steps", "2"),
    ],
}
_ROLLOUT_SETTINGS = {"MODEL_RANKS": 1, "SAMPLER_RANKS": 1, "DEVICE_TYPE": "CPU"}
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo_lora": {"RANKS": 2, "DEVICE_TYPE": "CPU", "ATTN_IMPLEMENTATION": "sdpa", "ROWS": 12},
    "dpo_full": {"POLICY_RANKS": 1, "REFERENCE_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 12},
    "grpo": {**_ROLLOUT_SETTINGS, "ROWS": 6},
    "short_math_grpo": {**_ROLLOUT_SETTINGS, "ROWS": 6},
    "multi_turn_grpo": {**_ROLLOUT_SETTINGS, "ENV_NUM_WORKERS": 1, "ENV_POOL_SIZE": 8},
    "ppo": {"POLICY_RANKS": 1, "CRITIC_RANKS": 1, "SAMPLER_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 6},
}
WITH_SAMPLER = ("grpo", "short_math_grpo", "multi_turn_grpo", "ppo")


def run_on_ray(names: Iterable[str], folder: Path, hub: Path, sampler: Literal["torch", "vllm"]) -> dict[str, LocalRun]:
    """Run scripts one after another, and return what each of them did; a script that failed has no calls."""
    jobs = {name: _job(name, folder / name) for name in names}
    file = folder / "jobs.json"
    file.write_text(json.dumps(list(jobs.values())))
    variables = {
        **os.environ,
        "DROPIN_HUB": str(hub),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{DROPIN / 'stand_ins'}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the cluster uses the loopback address
        "TWINKLE_CPU_PG_CPUS_PER_PROC": "0.25",
    }
    command = [sys.executable, str(SUPPORT / "run_on_ray.py"), sampler, str(file)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return {name: _read(job) for name, job in jobs.items()}


def _job(name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    output = f"{name}/output"  # relative to the directory that the cluster is started in
    return {
        "script": str(DROPIN / "local" / f"{name}.py"),
        "settings": SETTINGS[name],
        "arguments": [*ARGUMENTS[name], "--output-dir", output],
        "folder": str(folder),
        "record": str(folder / "record.jsonl"),
        "log": str(folder / "log.txt"),
    }


def _read(job: dict[str, Any]) -> LocalRun:
    folder, record = Path(job["folder"]), Path(job["record"])
    return LocalRun(folder, Path(job["log"]).read_text(), read_calls(record) if record.exists() else [])
