"""Recipes of tinker-cookbook, unmodified, train the demo model through the server (``make test-cookbook``)."""

from math import isfinite
from statistics import fmean

import httpx
import pytest

from tests.cookbook.recipes.offline_hub import BASE_MODEL, INSTRUCT_MODEL
from tests.cookbook.recipes.recipe_runs import Bench, Run

pytestmark = pytest.mark.cookbook

STEPS = 12
SMALL = {"batch_size": 8, "max_steps": STEPS, "max_length": 256, "learning_rate": 1e-3, "lora_rank": 8}


def test_sl_loop(bench: Bench) -> None:
    run = bench.start("sl_loop", "sl_loop", save_every=5, **SMALL).finish()
    losses = run.metric("train_mean_nll")
    assert list(losses) == list(range(STEPS))
    assert falls(losses)
    assert [record["name"] for record in run.checkpoints] == ["000005", "000010", "final"]
    assert run.complaints == []


def test_chat_sl_goes_on_after_an_interruption(bench: Bench) -> None:
    """The recipe saves a full checkpoint every 4 steps and a rolling one every 2.

    It deletes the previous rolling one.
    """
    options = {**SMALL, "model_name": INSTRUCT_MODEL, "save_every": 4, "rolling_save_every": 2, "eval_every": 4}
    first = bench.start("chat_sl.train", "chat_sl", **options).kill_when(lambda run: 4 in run.metric("progress"))
    saved = first.checkpoints[-1]
    losses, test_losses = first.metric("train_mean_nll"), first.metric("test/nll")

    second = bench.start("chat_sl.train", "chat_sl", behavior_if_log_dir_exists="resume", **options).finish()
    assert f"Resumed training from {saved['state_path']}" in second.said
    assert "Renderer metadata matches" in second.said
    resumed = second.metric("train_mean_nll")
    assert list(resumed) == list(range(saved["batch"], STEPS))
    assert resumed[saved["batch"]] < losses[4]  # it has kept what it learned
    assert falls(losses | resumed)
    assert falls(test_losses | second.metric("test/nll"))  # computed by the sampler
    assert first.complaints == second.complaints == []
    assert kept_checkpoints(bench, second) == {
        f"{kind}/{name}" for kind in ("weights", "sampler_weights") for name in (*periodic_saves(saved), "final")
    }


def test_rl_loop(bench: Bench) -> None:
    options = {"batch_size": 4, "group_size": 6, "max_tokens": 12, "max_steps": 2, "save_every": 1, "lora_rank": 8}
    run = bench.start("rl_loop", "rl_loop", **options).finish()
    rewards = run.metric("reward/total")
    assert list(rewards) == [0, 1]
    assert all(0 < reward < 1 for reward in rewards.values())  # with 0 or 1 there would be nothing to learn from
    assert all_finite(run)
    assert [record["name"] for record in run.checkpoints] == ["000001", "final"]
    assert run.complaints == []


def test_math_rl_on_arithmetic(bench: Bench) -> None:
    """Three steps are too few to show learning; benchmarks/arithmetic_rl.py does that."""
    options = {"groups_per_batch": 8, "group_size": 4, "learning_rate": 1e-3, "lora_rank": 8, "max_steps": 3}
    run = bench.start("math_rl.train", "arithmetic", model_name=BASE_MODEL, save_every=2, **options).finish()
    assert list(run.metric("env/all/correct")) == list(run.metric("env/all/reward/total")) == [0, 1, 2]
    # Half the mean squared difference between the log-probabilities of sampler and trainer: small enough to be bf16
    # rounding, so the sampler did not use the weights from before the step.
    assert all(gap < 0.01 for gap in run.metric("optim/kl_sample_train_v2").values())
    assert all_finite(run)
    assert [record["name"] for record in run.checkpoints] == ["000002", "final"]
    assert run.complaints == []


def all_finite(run: Run) -> bool:
    return all(isfinite(value) for row in run.metrics for value in row.values())


def falls(metric: dict[int, float]) -> bool:
    """Return whether the last third of a curve is far below its first point."""
    values = [metric[step] for step in sorted(metric)]
    return fmean(values[-(-len(values) * 2 // 3) :]) < values[0] / 4


def periodic_saves(saved: dict[str, int]) -> list[str]:
    return [f"{step:06d}" for step in range(saved["batch"], STEPS) if step % 4 == 0]


def kept_checkpoints(bench: Bench, run: Run) -> set[str]:
    """Return the checkpoints that the server still has of the model that the run trained last."""
    model_id = run.checkpoints[-1]["state_path"].removeprefix("tinker://").partition("/")[0]
    answer = httpx.get(
        f"{bench.url}/api/v1/training_runs/{model_id}/checkpoints",
        headers={"X-API-Key": bench.environment["TINKER_API_KEY"]},
        trust_env=False,
    )
    return {checkpoint["checkpoint_id"] for checkpoint in answer.json()["checkpoints"]}
