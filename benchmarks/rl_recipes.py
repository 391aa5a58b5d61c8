"""Do the four recipes of cookbook/rl learn? Each runs with several seeds; held-out sums are counted before and after.

Each run is a process of its own and writes its curves to DIR/RECIPE-SEED.json. A run whose file exists is not repeated,
so a benchmark that was stopped goes on where it was; with all files there it only reports. Other options are passed on
to the recipes.

A recipe has learned if with every seed more held-out sums are right after than before, and the mean gain is more than
two standard errors above 0. The standard error is s / sqrt(n), with the standard deviation s of the n gains.

    python benchmarks/rl_recipes.py --output build/bench/rl_recipes --plot docs/images/rl_recipes.svg --test 256
    python benchmarks/rl_recipes.py --recipes ppo ppo_full --seeds 0 1 2 --steps 40
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COOKBOOK = Path(__file__).parents[1] / "cookbook" / "rl"
RECIPES = {
    "grpo": "GRPO, adapter",
    "grpo_full": "GRPO, all parameters",
    "ppo": "PPO, adapter",
    "ppo_full": "PPO, all parameters",
}
COLORS = ("#1f77b4", "#d95f02", "#2ca02c", "#7570b3", "#e7298a")


@dataclass(frozen=True)
class Run:
    """One run of a recipe. ``shares``: of right held-out sums, before and after."""

    recipe: str
    seed: int
    rewards: list[float]
    shares: tuple[float, float]
    seconds: float

    @property
    def gain(self) -> float:
        return self.shares[1] - self.shares[0]


def main() -> None:
    args, passed_on = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    pairs = [(recipe, seed) for seed in args.seeds for recipe in args.recipes]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda pair: measure(*pair, args.output, passed_on), pairs))
    for line in table(runs, args.recipes):
        print(line)
    if args.plot:
        plot(runs, args.recipes, args.plot)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("build/bench/rl_recipes"), help="folder of the curves")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg or .png")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the processors and the GPU")
    return parser.parse_known_args()


def measure(recipe: str, seed: int, folder: Path, passed_on: list[str]) -> Run:
    """Run a recipe, unless its curves are there already, and return them."""
    file, curve = folder / f"{recipe}-{seed}.json", folder / f"{recipe}-{seed}.curve.json"
    if not file.exists():
        command = [sys.executable, str(COOKBOOK / f"{recipe}.py"), "--seed", str(seed), "--curve", str(curve)]
        started = time.monotonic()
        with (folder / f"{recipe}-{seed}.log").open("w") as log:
            done = subprocess.run([*command, *passed_on], stdout=log, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed; see {folder / f'{recipe}-{seed}.log'}")
        found = json.loads(curve.read_text()) | {"seconds": time.monotonic() - started, "options": passed_on}
        curve.unlink()
        file.write_text(json.dumps(found, indent=2) + "\n")
    found = json.loads(file.read_text())
    if found["options"] != passed_on:
        sys.exit(f"{file}: measured with the options {found['options']}, not {passed_on}; remove it or use --output")
    run = Run(recipe, seed, found["reward"], tuple(found["accuracy"]), found["seconds"])
    print(f"{recipe} seed {seed}: {run.shares[0]:.1%} → {run.shares[1]:.1%} right, {run.seconds:.0f} s", flush=True)
    return run


def table(runs: list[Run], recipes: list[str]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| recipe | held-out sums right, before → after, by seed | mean gain | standard error | gain / error |"]
    lines.append("|---|---|---|---|---|")
    for recipe in recipes:
        own = [run for run in runs if run.recipe == recipe]
        shares = ", ".join(f"{run.shares[0]:.1%} → {run.shares[1]:.1%}" for run in own)
        mean, error = statistics.mean(run.gain for run in own), standard_error([run.gain for run in own])
        ratio = f"{mean / error:.1f}" if error > 0 else "–"
        lines.append(f"| {RECIPES[recipe]} | {shares} | {mean:+.1%} | {error:.1%} | {ratio} |")
        learned = all(run.gain > 0 for run in own) and mean > 2 * error
        lines[-1] += "" if learned else " not learned |"
    return lines


def standard_error(gains: list[float]) -> float:
    return statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan


def plot(runs: list[Run], recipes: list[str], file: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "rl_recipes"  # the same curves give the same file
    figure = Figure(figsize=(3.2 * len(recipes), 3.2), layout="constrained")
    panels: Any = figure.subplots(1, len(recipes), sharey=True, squeeze=False)[0]
    for panel, recipe in zip(panels, recipes, strict=True):
        for color, run in zip(COLORS, (run for run in runs if run.recipe == recipe), strict=False):
            steps = range(1, len(run.rewards) + 1)
            panel.plot(steps, run.rewards, color=color, linewidth=1.5, label=f"seed {run.seed}")
        panel.set_title(RECIPES[recipe], fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward")
    panels[0].legend(frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
