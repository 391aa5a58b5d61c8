"""benchmarks/rl_recipes.py, with small programs in place of the recipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BENCHMARK = ROOT / "benchmarks" / "rl_recipes.py"
RECIPE = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--test", type=int)
parser.add_argument("--curve", type=pathlib.Path)
parser.add_argument("--steps", type=int, default=2)
args = parser.parse_args()
name = pathlib.Path(__file__).stem
print("the output of", name)
if name == "ppo" and args.seed == 1:
    sys.exit(3)
if name == "ppo_full" and args.seed == 1:
    time.sleep(60)
gain = {"grpo": 50 + args.seed, "grpo_full": 40 * args.seed}.get(name, 10)
shares = [100 / args.test, (100 + gain) / args.test]
args.curve.write_text(json.dumps({"reward": [0.1] * args.steps, "accuracy": shares}))
"""


@pytest.fixture
def benchmark(tmp_path: Path):
    """Return a function that runs a copy of the benchmark beside its own cookbook."""
    for folder in ("benchmarks", "cookbook/rl"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "benchmarks" / "rl_recipes.py").write_text(BENCHMARK.read_text())
    for recipe in ("grpo", "grpo_full", "ppo", "ppo_full"):
        (tmp_path / "cookbook/rl" / f"{recipe}.py").write_text(RECIPE)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, tmp_path / "benchmarks" / "rl_recipes.py", *arguments]
        return subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_failures_are_reported_and_the_other_runs_go_on(benchmark, tmp_path: Path) -> None:
    some = ("--recipes", "grpo", "grpo_full", "ppo", "--jobs", 3)
    done = benchmark("--output", "out", *some, "--steps", 3, "--device", "cpu")
    assert done.returncode == 1
    rows = {line.split(" | ")[0][2:]: line.strip("| ").split(" | ")[1:] for line in done.stdout.splitlines()[9:]}
    # gains 50, 51, 52 of 256: mean 51/256, standard error 1/√3/256
    expected = ["39.1% → 58.6%", "39.1% → 59.0%", "39.1% → 59.4%", "+19.9%", "0.2%", "88.3", "yes"]
    assert rows["GRPO, adapter"] == expected
    assert rows["GRPO, all parameters"][3:] == ["+15.6%", "9.0%", "1.7", "no"]  # one seed has gained nothing
    assert rows["PPO, adapter"][1] == "failed with exit code 3, see out/ppo-1.log"
    assert rows["PPO, adapter"][-1] == "no"
    assert (tmp_path / "out/ppo-1.log").read_text() == "the output of ppo\n"
    report = json.loads((tmp_path / "out/rl_recipes.json").read_text())
    assert len(report["runs"]) == 9
    assert report["runs"][0]["rewards"] == [0.1] * 3
    late = benchmark("--output", "out", "--recipes", "ppo_full", "--seeds", 1, "--timeout", 0.5)
    assert "ppo_full seed 1: timed out after 0.5 s" in late.stdout
    assert late.returncode == 1


def test_results_are_not_repeated_or_mixed_and_can_be_drawn_later(benchmark, tmp_path: Path) -> None:
    few = ("--output", "out", "--recipes", "grpo", "--seeds", 0, 2)
    assert benchmark(*few).returncode == 0
    first = (tmp_path / "out/grpo-0.json").read_text()
    assert benchmark(*few).returncode == 0
    assert (tmp_path / "out/grpo-0.json").read_text() == first  # with the seconds of the first time
    other = benchmark(*few, "--steps", 9)
    assert "was measured with --test 256, not with --test 256 --steps 9" in other.stderr
    drawn = benchmark("--from", "out", "--plot", "plot.svg")
    assert drawn.returncode == 0
    assert "| GRPO, adapter | 39.1% → 58.6% | 39.1% → 59.4% | +19.9% | 0.4% | 51.0 | yes |" in drawn.stdout
    assert (tmp_path / "plot.svg").exists() or "no matplotlib" in drawn.stdout
    assert "runs no recipes" in benchmark("--from", "out", "--steps", 9).stderr
    assert "no RECIPE-SEED.json" in benchmark("--from", "nowhere").stderr
