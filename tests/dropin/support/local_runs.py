"""Run the scripts for torchrun, and read what they recorded."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.dropin.support.client_runs import DROPIN, SUPPORT, Call
from tests.dropin.support.hub_folder import EXPERTS, MODEL
from tests.support.paths import SOURCE

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RATE = 1e-2
COMMON = ["--model-id", f"ms://{MODEL}", "--lora-dropout", "0", "--log-interval", "1", "--learning-rate", str(RATE)]
# Command lines of the scripts. lora_dropout is 0, because its masks could not be compared with another run's.
ARGUMENTS: dict[str, list[str]] = {
    "fsdp2": [
        *COMMON,
        *("--fsdp-size", "2", "--dp-size", "1", "--batch-size", "8", "--train-samples", "24"),
        *("--eval-samples", "8", "--eval-interval", "2", "--output-dir", "output"),
    ],
    "sp_fsdp_dense": [
        *COMMON,
        *("--dp-size", "1", "--fsdp-size", "2", "--ulysses-size", "2", "--nproc-per-node", "2", "--batch-size", "4"),
        *("--gradient-accumulation-steps", "2", "--strategy", "native_fsdp", "--template-cls", "Qwen3_5Template"),
    ],
    "ep_fsdp2_lora_qwen3_5_moe": [
        *COMMON,
        *("--model-id", f"ms://{EXPERTS}", "--dp-size", "1", "--fsdp-size", "2", "--ep-size", "2"),
        *("--batch-size", "8", "--train-samples", "24"),
    ],
    "ep_fsdp2_lora_deepseek_v4": [
        *COMMON,
        *("--model-id", f"ms://{EXPERTS}", "--dp-size", "1", "--fsdp-size", "2", "--ep-size", "2"),
        *("--batch-size", "8", "--train-samples", "24"),
    ],
}
_SHORT = ("--batch-size", "8", "--train-samples", "24", "--eval-samples", "8", "--eval-interval", "2")
# The scripts with models of Megatron: two tensor parallel processes; with experts, each holds half of them.
MEGATRON_ARGUMENTS: dict[str, list[str]] = {
    "tp": [
        *COMMON,
        *("--dp-size", "1", "--tp-size", "2", "--pp-size", "1", "--cp-size", "1"),
        *(*_SHORT, "--output-dir", "output"),
    ],
    "tp_moe": [
        *COMMON,
        *("--model-id", f"ms://{EXPERTS}", "--dp-size", "1", "--tp-size", "2", "--pp-size", "1", "--ep-size", "2"),
        *("--lora-target-modules", "q_proj,k_proj,v_proj,o_proj"),
        *(*_SHORT, "--output-dir", "output"),
    ],
}


@dataclass(frozen=True)
class LocalRun:
    """What a script did. ``folder`` is its working directory, which also has the folder ``initial`` of an adapter."""

    folder: Path
    output: str
    calls: list[Call]

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    @property
    def losses(self) -> list[float]:
        """The losses of the training metrics, which are rounded to four digits."""
        metrics = self.named("calculate_metric")
        return [float(call.result["loss"]) for call in metrics if call.given["is_training"]]


def run_local(name: str, folder: Path, hub: Path) -> LocalRun:
    """Run a script in two processes."""
    record = folder / "record.jsonl"
    command = [
        *TORCHRUN,
        str(SUPPORT / "run_local.py"),
        str(record),
        str(DROPIN / "local" / f"{name}.py"),
        *(ARGUMENTS | MEGATRON_ARGUMENTS)[name],
    ]
    variables = {
        **os.environ,
        "DROPIN_HUB": str(hub),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{DROPIN / 'stand_ins'}",
    }
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return LocalRun(folder, done.stdout + done.stderr, read_calls(record))


def read_calls(record: Path) -> list[Call]:
    return [Call(each["call"], each["given"], each["result"]) for each in map(json.loads, record.open())]
