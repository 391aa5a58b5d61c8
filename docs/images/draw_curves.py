"""Draws the curves of docs/training.md and docs/images.md from what the cookbook's scripts wrote with --curve.

python docs/images/draw_curves.py --dpo dpo.json --grpo grpo_0.json grpo_1.json grpo_2.json
python docs/images/draw_curves.py --pictures seed_0.json seed_1.json seed_2.json   # of a client's multi_modal.py
python docs/images/draw_curves.py --grpo-pictures seed_0.json seed_1.json seed_2.json   # of rl/grpo/grpo_mm.py

The files of --pictures are those of the seeds 0, 1, … with the default numbers of rows.
"""

import argparse
import json
import sys
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[2] / "cookbook" / "data"))
from draw_pictures import drawn_rows

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


def draw_grpo(files: list[Path], name: str = "grpo.svg") -> None:
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
    figure.savefig(HERE / name, metadata={"Date": None})


def draw_pictures(files: list[Path]) -> None:
    """Draw the first held-out pictures with what the model said about them, and the losses of all seeds."""
    curves = [json.loads(file.read_text()) for file in files]
    said_before, said_after = curves[0]["said"]
    held_out = drawn_rows(160 + 64, seed=0)[160:]
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.6))
    for axes, row, first, last in zip(above.subplots(1, 8), held_out, said_before, said_after, strict=False):
        axes.imshow(row["image"])
        axes.set_axis_off()
        printable = "".join(letter if " " < letter < "~" and letter not in "$\\" else "·" for letter in first)
        axes.set_title(f"before: {printable[:6]}", fontsize=7, color="#777777")
        axes.text(0.5, -0.14, f"after: {last}", fontsize=8, ha="center", transform=axes.transAxes)
    axes = below.subplots()
    for seed, (curve, color) in enumerate(zip(curves, COLORS, strict=False)):
        first, last = curve["accuracy"]
        label = f"seed {seed}: {first:.0%} → {last:.0%} of 64 held-out pictures right"
        axes.plot(range(1, len(curve["loss"]) + 1), curve["loss"], color=color, label=label)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(HERE / "multi_modal.svg", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dpo", type=Path)
    parser.add_argument("--grpo", type=Path, nargs="+")
    parser.add_argument("--pictures", type=Path, nargs="+")
    parser.add_argument("--grpo-pictures", type=Path, nargs="+")
    args = parser.parse_args()
    if not any(vars(args).values()):
        parser.error("nothing to draw: name the files of at least one option")
    if args.dpo:
        draw_dpo(args.dpo)
    if args.grpo:
        draw_grpo(args.grpo)
    if args.pictures:
        draw_pictures(args.pictures)
    if args.grpo_pictures:
        draw_grpo(args.grpo_pictures, "grpo_mm.svg")
