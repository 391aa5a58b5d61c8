"""Draws the curves of docs/training.md from what the cookbook's scripts wrote with --curve.

python docs/images/draw_curves.py --dpo dpo.json --grpo grpo_0.json grpo_1.json grpo_2.json
"""

import argparse
import json
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

HERE = Path(__file__).parent
COLORS = ("#2a9d8f", "#e76f51", "#264653")

rcParams["svg.hashsalt"] = "twinkle"  # the same curves make the same file
rcParams["svg.fonttype"] = "none"


def draw_dpo(file: Path) -> None:
    curves = json.loads(file.read_text())
    margins, accuracies = zip(*curves["train"], strict=True)
    held_margins, held_accuracies = zip(*curves["held_out"], strict=True)
    steps = range(1, len(margins) + 1)
    each = len(margins) // len(held_margins)  # steps of an epoch
    epochs = range(each, len(margins) + 1, each)
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, margins, color=COLORS[0], label="training batch")
    left.plot(epochs, held_margins, "o-", color=COLORS[1], label="held-out pairs")
    left.set(xlabel="step", ylabel="margin", title="β·(Δchosen − Δrejected)")
    right.plot(steps, accuracies, color=COLORS[0])
    right.plot(epochs, held_accuracies, "o-", color=COLORS[1])
    right.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.05), title="pairs with a margin above 0")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "dpo.svg", metadata={"Date": None})


def draw_grpo(files: list[Path]) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for seed, (file, color) in enumerate(zip(files, COLORS, strict=False)):
        rewards = json.loads(file.read_text())["reward"]
        smooth = [
            sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))
        ]
        axes.plot(range(1, len(rewards) + 1), rewards, "o", color=color, markersize=3, alpha=0.5)
        axes.plot(range(1, len(rewards) + 1), smooth, color=color, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1), title="dots: each step; lines: mean of five")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(HERE / "grpo.svg", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dpo", type=Path, required=True)
    parser.add_argument("--grpo", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    draw_dpo(args.dpo)
    draw_grpo(args.grpo)
