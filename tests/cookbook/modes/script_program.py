"""Run cookbook scripts with small settings, one after another: in one process, under torchrun, or on a Ray cluster.

    python script_program.py local|ray OUTPUT SCRIPT…

Each script writes its curve to OUTPUT/NAME.json and saves its weights in the same folder. TWINKLE_MODEL is the model.
"""

import runpy
import sys
from pathlib import Path

import torch

import twinkle
from twinkle.advantage import GRPOAdvantage

COOKBOOK = Path(__file__).parents[3] / "cookbook"
_TRAINING = ["--epochs", "1", "--batch-size", "16", "--precision", "fp32"]
SETTINGS = {
    "transformers/sft_lora.py": _TRAINING,
    "transformers/sft_full.py": _TRAINING,
    "transformers/multi_lora.py": _TRAINING,
    "transformers/fsdp2.py": _TRAINING,
    "transformers/sp_fsdp_dense.py": [*_TRAINING, "--accumulation", "2"],
    "transformers/dpo.py": ["--epochs", "1", "--batch-size", "24"],
    "rl/grpo.py": ["--steps", "2", "--prompts", "3", "--samples", "4"],
}
_RL = [*SETTINGS["rl/grpo.py"], "--test", "5", "--precision", "fp32"]
WITHOUT_RAY = {"rl/grpo_full.py": _RL, "rl/ppo.py": [*_RL, "--kl-coef", "0.1"], "rl/ppo_full.py": _RL}
_SEEING = ["--model", "random://qwen3-vl-tiny", "--precision", "fp32"]
PICTURES = {"mm/fsdp2.py": [*_SEEING, "--rows", "8", "--test", "8", "--epochs", "2", "--batch-size", "4"]}


def ranked(_: GRPOAdvantage, rewards: list[float], num_generations: int) -> torch.Tensor:
    """Return advantages by position, because a random model never adds correctly. Those of the last sum are 0."""
    values = torch.linspace(-1, 1, len(rewards))
    values[-num_generations:] = 0
    return values


def run(mode: str, output: Path, script: str) -> None:
    arguments = [*(SETTINGS | WITHOUT_RAY | PICTURES)[script], "--curve", str(output / f"{Path(script).stem}.json")]
    if script.startswith(("transformers/", "mm/")):
        arguments += ["--output", str(output)]
    if mode == "ray":
        arguments += ["--mode", "ray"]
    sys.argv = [script, *arguments]
    runpy.run_path(str(COOKBOOK / script), run_name="__main__")
    twinkle.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    GRPOAdvantage.__call__ = ranked
    if sys.argv[1] == "ray":
        import ray

        ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    mode, output, scripts = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for each in scripts:
        run(mode, output, each)
    if mode == "ray":
        ray.shutdown()
