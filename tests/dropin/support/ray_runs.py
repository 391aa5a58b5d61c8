"""Run the scripts for Ray, all on one cluster, and read what they recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.dropin.support.client_runs import DROPIN, SUPPORT
from tests.dropin.support.hub_folder import TEACHER
from tests.dropin.support.local_runs import COMMON, LocalRun, read_calls
from tests.support.paths import SOURCE
from tests.support.servers.running import PATIENT_RAY

FULL_RATE = 1e-3  # all parameters change less than an adapter does


@dataclass(frozen=True)
class RayScript:
    """How a script for Ray is run: its command line, and other values for constants at its top."""

    arguments: tuple[str, ...]
    settings: Mapping[str, Any]


_GROUPS = (*COMMON, "--strategy", "native_fsdp", "--model-gpus", "1")
_SAMPLER = (
    *("--sampler-gpus", "1", "--batch-size", "2", "--num-generations", "4", "--max-tokens", "12"),
    *("--max-model-len", "2048", "--micro-batch-size", "2"),
)
_ROLLOUTS = (*_GROUPS, *_SAMPLER)
_ROLLOUT_SETTINGS = {"MODEL_RANKS": 1, "SAMPLER_RANKS": 1, "DEVICE_TYPE": "CPU"}
_DPO = ("--batch-size", "4", "--max-steps", "3", "--save-steps", "2")
_DPO_FULL = ("--batch-size", "4", "--max-steps", "3", "--save-steps", "2", "--learning-rate", str(FULL_RATE))
_GRPO = ("--mini-batch-size", "4", "--max-steps", "4", "--save-steps", "3")
_SHORT_MATH = ("--mini-batch-size", "3", "--max-steps", "6")
# Scripts with models of Transformers, in one process each (dpo_lora in two). lora_dropout is 0, because its masks could
# not be compared with another run's; only ppo.py has a dropout of its own.
TRANSFORMERS: dict[str, RayScript] = {
    "dpo_lora": RayScript(
        (*_GROUPS, "--model-gpus", "2", *_DPO),
        {"RANKS": 2, "DEVICE_TYPE": "CPU", "ATTN_IMPLEMENTATION": "sdpa", "ROWS": 12},
    ),
    "dpo_full": RayScript(
        (*_GROUPS, "--ref-model-gpus", "1", *_DPO_FULL),
        {"POLICY_RANKS": 1, "REFERENCE_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 12},
    ),
    "grpo": RayScript((*_ROLLOUTS, *_GRPO), {**_ROLLOUT_SETTINGS, "ROWS": 6}),
    "short_math_grpo": RayScript((*_ROLLOUTS, *_SHORT_MATH), {**_ROLLOUT_SETTINGS, "ROWS": 6}),
    "multi_turn_grpo": RayScript(
        (*_ROLLOUTS, "--max-tokens", "24", *_SHORT_MATH),
        {**_ROLLOUT_SETTINGS, "ENV_NUM_WORKERS": 1, "ENV_POOL_SIZE": 8},
    ),
    "ppo": RayScript(
        (
            *_ROLLOUTS,
            *("--critic-model-gpus", "1", "--mini-batch-size", "4", "--num-train-epochs", "2", "--max-steps", "2"),
            *("--kl-coef", "0.1", "--gae-lambda", "0.9", "--critic-learning-rate", str(FULL_RATE), "--save-steps", "2"),
        ),
        {"POLICY_RANKS": 1, "CRITIC_RANKS": 1, "SAMPLER_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 6},
    ),
}
WITH_SAMPLER = ("grpo", "short_math_grpo", "multi_turn_grpo", "ppo")

_MEGATRON = (*COMMON, "--model-gpus", "2", "--mixed-precision", "fp32")
_MEGATRON_ROLLOUTS = (*_MEGATRON, *_SAMPLER)
_TWO_STAGES = {"MODEL_RANKS": 2, "SAMPLER_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 6}
_DISTILLATION = (
    *_MEGATRON,
    *("--teacher-model-id", f"ms://{TEACHER}"),
    *("--sampler-gpus", "1", "--batch-size", "2", "--gkd-topk", "8", "--gkd-beta", "0.25", "--gkd-temperature", "2.0"),
    *("--max-tokens", "12", "--max-model-len", "2048", "--max-steps", "3", "--save-steps", "2"),
)
# Scripts with models of Megatron, each in two processes: two pipeline stages, or two tensor parallel ranks.
MEGATRON: dict[str, RayScript] = {
    "dpo_lora": RayScript((*_MEGATRON, *_DPO), {"RANKS": 2, "DEVICE_TYPE": "CPU", "ROWS": 12}),
    "dpo_full": RayScript(
        (*_MEGATRON, "--ref-model-gpus", "2", *_DPO_FULL),
        {"POLICY_RANKS": 2, "REFERENCE_RANKS": 2, "DEVICE_TYPE": "CPU", "ROWS": 12},
    ),
    "dpo_multi_lora": RayScript((*_MEGATRON, *_DPO), {"RANKS": 2, "DEVICE_TYPE": "CPU", "ROWS": 12}),
    "gkd_off_policy": RayScript(_DISTILLATION, {"MODEL_RANKS": 2, "SAMPLER_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 6}),
    "gkd_on_policy": RayScript(
        _DISTILLATION, {"MODEL_RANKS": 2, "STUDENT_RANKS": 1, "TEACHER_RANKS": 1, "DEVICE_TYPE": "CPU", "ROWS": 2}
    ),
    "grpo": RayScript((*_MEGATRON_ROLLOUTS, *_GRPO), _TWO_STAGES),
    "short_math_grpo": RayScript((*_MEGATRON_ROLLOUTS, *_SHORT_MATH), _TWO_STAGES),
    "short_math_grpo_multi_lora": RayScript((*_MEGATRON_ROLLOUTS, *_SHORT_MATH), _TWO_STAGES),
}
MEGATRON_WITH_SAMPLER = tuple(name for name in MEGATRON if not name.startswith("dpo"))


def run_on_ray(
    scripts: Mapping[str, RayScript], folder: Path, hub: Path, sampler: Literal["torch", "vllm"]
) -> dict[str, LocalRun]:
    """Run scripts one after another, and return what each of them did; a script that failed has no calls."""
    jobs = {name: _job(name, script, folder / name) for name, script in scripts.items()}
    file = folder / "jobs.json"
    file.write_text(json.dumps(list(jobs.values())))
    variables = {
        **os.environ,
        **PATIENT_RAY,
        "DROPIN_HUB": str(hub),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{DROPIN / 'stand_ins'}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the cluster uses the loopback address
        "TWINKLE_CPU_PG_CPUS_PER_PROC": "0.25",
    }
    command = [sys.executable, str(SUPPORT / "run_on_ray.py"), sampler, str(file)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return {name: _read(job) for name, job in jobs.items()}


def _job(name: str, script: RayScript, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    output = f"{name}/output"  # relative to the directory that the cluster is started in
    return {
        "script": str(DROPIN / "local" / f"{name}.py"),
        "settings": dict(script.settings),
        "arguments": [*script.arguments, "--output-dir", output],
        "folder": str(folder),
        "record": str(folder / "record.jsonl"),
        "log": str(folder / "log.txt"),
    }


def _read(job: dict[str, Any]) -> LocalRun:
    folder, record = Path(job["folder"]), Path(job["record"])
    return LocalRun(folder, Path(job["log"]).read_text(), read_calls(record) if record.exists() else [])
