"""Do the four recipes of cookbook/rl learn? Each runs with several seeds; held-out sums are counted before and after.

Each run is a process of its own. It writes its results to DIR/RECIPE-SEED.json and its output to DIR/RECIPE-SEED.log.
A run that fails or takes too long is reported, and the others go on. A run whose results exist is not repeated, so a
benchmark that was stopped goes on where it was. DIR/rl_recipes.json has the results of all runs and the table. Options
that are not listed below are passed on to the recipes.

A recipe has learned if with every seed more held-out sums are right after than before, and the mean gain is more than
two standard errors above 0. The standard error is s / sqrt(n), with the standard deviation s of the n gains.

    python benchmarks/rl_recipes.py --output build/bench/rl_recipes --plot docs/images/rl_recipes.svg
    python benchmarks/rl_recipes.py --recipes ppo ppo_full --seeds 0 1 2 --steps 40 --jobs 6
    python benchmarks/rl_recipes.py --from build/bench/rl_recipes --plot docs/images/rl_recipes.svg   # runs nothing
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
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
    """One run of a recipe. ``before`` and ``after``: the number of the ``test`` held-out sums that were right."""

    recipe: str
    seed: int
    test: int
    options: list[str]
    before: int
    after: int
    rewards: list[float]  # the mean reward of each step
    explained_variance: list[float]  # of each step; empty for GRPO, which has no critic
    seconds: float

    @property
    def gain(self) -> float:
        """Return the difference of the shares of right answers."""
        return (self.after - self.before) / self.test

    def __str__(self) -> str:
        return f"{self.before / self.test:.1%} → {self.after / self.test:.1%}"


@dataclass(frozen=True)
class Failure:
    """A run without results, and why it has none."""

    recipe: str
    seed: int
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Settings:
    """What all runs have in common. ``options`` are passed on to the recipes."""

    folder: Path
    test: int
    options: list[str]
    timeout: float | None
    environment: dict[str, str] = field(default_factory=dict)


def main() -> None:
    args, options = parse_arguments()
    if args.results is not None:
        outcomes: list[Run | Failure] = [read_run(file) for file in sorted(args.results.glob("*-*.json"))]
        if not outcomes:
            sys.exit(f"--from {args.results}: there is no RECIPE-SEED.json; run the recipes with --output first")
    else:
        settings = Settings(args.output, args.test, options, args.timeout, environment(args.device, args.jobs))
        outcomes = run_all(args.recipes, args.seeds, settings, args.jobs)
    lines = table(outcomes)
    print(*lines, sep="\n")
    folder = args.output if args.results is None else args.results
    report = {"runs": [asdict(each) for each in outcomes], "table": lines}
    (folder / "rl_recipes.json").write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw([each for each in outcomes if isinstance(each, Run)], args.plot, folder)
    if any(isinstance(each, Failure) for each in outcomes):
        sys.exit("some runs failed: see their logs")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--test", type=int, default=256, help="number of held-out sums")
    parser.add_argument("--output", type=Path, default=Path("build/bench/rl_recipes"), metavar="DIR")
    parser.add_argument("--from", dest="results", type=Path, metavar="DIR", help="run nothing, report what is there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rewards: .svg or .png; needs matplotlib")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the processors and the GPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop a run that takes longer")
    args, options = parser.parse_known_args()
    if args.jobs < 1 or args.test < 1:
        parser.error("--jobs and --test must be 1 or more")
    if args.results is not None and options:
        parser.error(f"--from runs no recipes, so there is none to pass {' '.join(options)} on to")
    return args, options


# --- runs -------------------------------------------------------------------------------------------------------------


def environment(device: str | None, jobs: int) -> dict[str, str]:
    """Return the variables of all runs, among which the processors are divided."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch finds no GPU here")
    own = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | own


def run_all(recipes: list[str], seeds: list[int], settings: Settings, jobs: int) -> list[Run | Failure]:
    settings.folder.mkdir(parents=True, exist_ok=True)
    pairs = [(recipe, seed) for seed in seeds for recipe in recipes]
    for recipe, seed in pairs:
        check_options(settings.folder / f"{recipe}-{seed}.json", settings)
    pool = ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(lambda pair: measure(*pair, settings), pairs))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, which also stops the runs, no other begins


def check_options(file: Path, settings: Settings) -> None:
    """Exit if there are results of another measurement, with which these would be mixed."""
    if not file.exists():
        return
    run = read_run(file)
    if (run.options, run.test) != (settings.options, settings.test):
        had, wanted = (" ".join(["--test", str(each.test), *each.options]) for each in (run, settings))
        sys.exit(f"{file} was measured with {had}, not with {wanted}: remove it, or give another --output")


def measure(recipe: str, seed: int, settings: Settings) -> Run | Failure:
    """Run a recipe, unless its results are there already, and return them."""
    file = settings.folder / f"{recipe}-{seed}.json"
    outcome = read_run(file) if file.exists() else run_recipe(recipe, seed, settings)
    if isinstance(outcome, Run):
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
        partial.replace(file)
    seconds = f" right, {outcome.seconds:.0f} s" if isinstance(outcome, Run) else ""
    print(f"{recipe} seed {seed}: {outcome}{seconds}", flush=True)
    return outcome


def run_recipe(recipe: str, seed: int, settings: Settings) -> Run | Failure:
    curve, log_file = (settings.folder / f"{recipe}-{seed}.{kind}" for kind in ("curve", "log"))
    curve.unlink(missing_ok=True)
    command = [sys.executable, str(COOKBOOK / f"{recipe}.py"), "--seed", str(seed), "--test", str(settings.test)]
    started = time.monotonic()
    with log_file.open("w") as log:
        try:
            done = subprocess.run(
                [*command, "--curve", str(curve), *settings.options],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=settings.timeout,
                env=settings.environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Failure(recipe, seed, f"timed out after {settings.timeout:g} s")
    if done.returncode != 0 or not curve.exists():
        return Failure(recipe, seed, f"failed with exit code {done.returncode}, see {log_file}")
    found = json.loads(curve.read_text())
    curve.unlink()
    before, after = (round(share * settings.test) for share in found["accuracy"])
    explained = found.get("explained_variance", [])
    seconds = time.monotonic() - started
    return Run(recipe, seed, settings.test, settings.options, before, after, found["reward"], explained, seconds)


def read_run(file: Path) -> Run:
    return Run(**json.loads(file.read_text()))


# --- report -----------------------------------------------------------------------------------------------------------


def table(outcomes: list[Run | Failure]) -> list[str]:
    """Return the lines of a Markdown table: the shares of right held-out sums, and whether a recipe has learned."""
    seeds = sorted({each.seed for each in outcomes})
    head = ["recipe", *(f"seed {seed}" for seed in seeds), "mean gain", "standard error", "gain / error", "learned"]
    rows = [head, ["---"] * len(head)]
    for recipe, title in RECIPES.items():
        own = {each.seed: each for each in outcomes if each.recipe == recipe}
        if own:
            rows.append([title, *(str(own.get(seed, "–")) for seed in seeds), *summary(list(own.values()))])
    return [f"| {' | '.join(row)} |" for row in rows]


def summary(outcomes: list[Run | Failure]) -> list[str]:
    """Return mean gain, standard error, their ratio, and yes or no."""
    gains = [each.gain for each in outcomes if isinstance(each, Run)]
    if len(gains) < 2:
        return [f"{gains[0]:+.1%}" if gains else "–", "–", "–", "unknown"]
    mean, error = statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    learned = len(gains) == len(outcomes) and min(gains) > 0 and mean > 2 * error
    return [f"{mean:+.1%}", f"{error:.1%}", f"{mean / error:.1f}" if error > 0 else "–", "yes" if learned else "no"]


def draw(runs: list[Run], file: Path, folder: Path) -> None:
    """Draw the curves, if matplotlib is there; a machine without it can leave that to another."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no plot, as there is no matplotlib here; draw it later: --from {folder} --plot {file}")
    elif not runs:
        print("no plot, as no run has results")
    else:
        plot(runs, file)


def plot(runs: list[Run], file: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.rcParams["svg.hashsalt"] = "rl_recipes"  # the same curves give the same file
    recipes = [recipe for recipe in RECIPES if any(run.recipe == recipe for run in runs)]
    figure = Figure(figsize=(3 * len(recipes), 3), layout="constrained")
    panels: Any = figure.subplots(1, len(recipes), sharey=True, squeeze=False)[0]
    for panel, recipe in zip(panels, recipes, strict=True):
        own = sorted((run for run in runs if run.recipe == recipe), key=lambda run: run.seed)
        for number, run in enumerate(own):
            steps, color = range(1, len(run.rewards) + 1), COLORS[number % len(COLORS)]
            panel.plot(steps, run.rewards, color=color, linewidth=1.5, label=f"seed {run.seed}")
        panel.set(title=RECIPES[recipe], xlabel="step", ylim=(0, 1))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward")
    panels[0].legend(frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
