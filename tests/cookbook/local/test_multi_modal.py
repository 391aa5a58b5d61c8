"""The local scripts with pictures run a few steps on a tiny model that sees. What they learn is in docs/images.md."""

import json
import runpy
import sys
from collections import Counter

import datasets
import pytest
import torch
from safetensors.torch import load_file

from tests.support.paths import ROOT
from twinkle.advantage import GRPOAdvantage

COOKBOOK = ROOT / "cookbook"
SMALL = ("--rows", 8, "--test", 8, "--epochs", 2, "--batch-size", 4, "--seed", 3, "--precision", "fp32")


@pytest.fixture
def run(monkeypatch):
    """``run(script, *arguments)`` runs a script and returns its global names."""
    monkeypatch.delenv("TWINKLE_MODEL", raising=False)  # the scripts' own model is tiny
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(script: str, *arguments: object) -> dict:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return runpy.run_path(str(COOKBOOK / script), run_name="__main__")

    yield run
    torch.set_num_threads(threads)


def test_both_scripts_of_sft(run, tmp_path):
    """They compute the same in one process, with drawn pictures and with a file. Adapters leave the tower alone."""
    file = tmp_path / "rows.parquet"
    drawn = runpy.run_path(str(COOKBOOK / "data/draw_pictures.py"))["drawn_rows"]
    datasets.Dataset.from_list(drawn(16, seed=3)).to_parquet(file)
    curves = []
    for script, *data in (("transformers/multi_modal.py",), ("mm/fsdp2.py", "--data", file)):
        run(script, *SMALL, *data, "--curve", tmp_path / "c.json", "--output", tmp_path)
        curves.append(json.loads((tmp_path / "c.json").read_text()))
    whole, sharded = curves
    assert len(whole["loss"]) == 4
    assert whole["loss"][-1] < whole["loss"][0]
    assert whole["accuracy"][0] == 0.25  # two pictures of each colour: a model that knows nothing says the same to all
    assert sharded["loss"] == pytest.approx(whole["loss"], abs=1e-4)
    assert sharded["accuracy"] == whole["accuracy"]
    saved = load_file(tmp_path / "multi_modal" / "adapter_model.safetensors")
    assert saved
    assert not [name for name in saved if "visual" in name]


def test_grpo(run, tmp_path, monkeypatch):
    """A model without a warm-up says no letter, so its answers get advantages by their position in the batch."""
    monkeypatch.setattr(
        GRPOAdvantage, "__call__", lambda _, rewards, num_generations: torch.linspace(-1, 1, len(rewards))
    )
    small = ("--rows", 4, "--test", 4, "--warm-up", 1, "--steps", 2, "--prompts", 2, "--samples", 4)
    names = run("rl/grpo/grpo_mm.py", *small, "--precision", "fp32", "--curve", tmp_path / "c.json")
    assert len(names["useful"]) == 8
    assert all("pixel_values" in sequence.new_input_feature for sequence, _ in names["useful"])
    assert len(json.loads((tmp_path / "c.json").read_text())["reward"]) == 2


@pytest.mark.parametrize(
    ("script", "arguments", "text"),
    [
        ("transformers/multi_modal.py", ("--rows", 0), "--rows: got 0, allowed: 1 or more"),
        ("mm/fsdp2.py", ("--epochs", 0), "--epochs: got 0, allowed: 1 or more"),
        ("rl/grpo/grpo_mm.py", ("--samples", 1), "--samples: got 1, allowed: 2 or more"),
        (
            "rl/grpo/grpo_mm.py",
            ("--data", "ms://some/rows"),
            "--warm-up: got 50, allowed: 0 with --data ms://some/rows",
        ),
    ],
)
def test_wrong_numbers_are_named(run, capsys, script, arguments, text):
    with pytest.raises(SystemExit):
        run(script, *arguments)
    assert text in capsys.readouterr().err


def test_drawn_rows():
    names = runpy.run_path(str(COOKBOOK / "data/draw_pictures.py"))
    rows, again, other = (names["drawn_rows"](16, seed, side=64) for seed in (0, 0, 1))
    assert Counter(row["text"] for row in rows) == dict.fromkeys(names["COLOURS"], 4)
    assert [row["image"].tobytes() for row in rows] == [row["image"].tobytes() for row in again]
    assert len({row["image"].tobytes() for row in [*rows, *other]}) == 32
    for row in rows:  # nothing but a grey ground and the colour that the text names
        (grey,) = {colour for _, colour in row["image"].getcolors()} - {names["COLOURS"][row["text"]]}
        assert len({*grey}) == 1
    assert names["sheet"](rows, columns=6).size == (6 * 64 + 5 * 8, 3 * (64 + 16) + 2 * 8)
