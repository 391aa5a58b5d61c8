"""Several processes train all parameters of a model to the same weights as one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.model.parallel.all_parameters_programs import (
    one_rank_is_wrong,
    own_share_of_all,
    saved_and_continued,
    train,
)
from tests.model.parallel.lora_programs import Request, Sizes
from tests.model.parallel.process_pool import ProcessPool
from twinkle.model.trainer.shard_requests import RequestShards

TOLERANCE = 1e-5  # fp32: the bound on what may differ from plain torch

DATA, SHARDS, BOTH = {"dp_size": 2}, {"dp_size": 1, "fsdp_size": 2}, {"dp_size": 2, "fsdp_size": 2}
SPREADS = pytest.mark.parametrize("sizes", [DATA, SHARDS], ids=["dp", "fsdp"])


def assert_close(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        error = np.linalg.norm(ours[name] - wanted) / max(np.linalg.norm(wanted), 1e-30)
        assert error <= tolerance, f"{name}: {error:.1e}"


def assert_same_training(together: list[dict[str, Any]], alone: Mapping[str, Any], tolerance: float) -> None:
    assert_close(together[0]["gradients"], alone["gradients"], tolerance)
    assert_close(together[0]["weights"], alone["weights"], tolerance)
    for each in together:
        assert_close(each["computed"], alone["computed"], tolerance)
        assert each["steps"] == alone["steps"]
    losses = np.sum([each["losses"] for each in together], 0)
    np.testing.assert_allclose(losses, alone["losses"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(together[0]["norms"], alone["norms"], rtol=tolerance, atol=tolerance)
    scored = [array for each in together for array in each["scored"]]
    for ours, theirs in zip(scored, alone["scored"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@SPREADS
def test_two_processes_train_as_one(two: ProcessPool, sizes: Sizes, tied: bool) -> None:
    assert_same_training(two.run(train, sizes, "toy", tied), train({}, "toy", tied), TOLERANCE)


@SPREADS
def test_a_vision_model_trains_on_text(two: ProcessPool, sizes: Sizes) -> None:
    assert_same_training(two.run(train, sizes, "qwen2_vl"), train({}, "qwen2_vl"), TOLERANCE)


def test_four_processes_train_as_one(four: ProcessPool) -> None:
    assert_same_training(four.run(train, BOTH), train({}), TOLERANCE)


def test_a_sharded_model_computes_in_bf16_from_fp32_weights(two: ProcessPool) -> None:
    """Gradients are sums of bf16 numbers in another order; weights differ by what Adam makes of that."""
    assert_same_training(two.run(train, SHARDS, "toy", False, True), train({}, "toy", False, True), 2e-2)


@SPREADS
def test_checkpoints_and_snapshots_are_whole(two: ProcessPool, sizes: Sizes, tmp_path: Path) -> None:
    first, second = two.run(saved_and_continued, sizes, str(tmp_path))
    assert_close(first["after"], first["fresh"], 0.0)
    for name in ("loaded", "restored"):
        assert_close(first[name], first["continued"], 0.0)
    assert first["snapshot"] == sum(array.size for array in first["fresh"].values())
    assert second["snapshot"] == 0
    alone = saved_and_continued({}, str(tmp_path / "alone"))
    assert_close(first["continued"], alone["continued"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@SPREADS
def test_a_request_that_fails_on_one_rank_fails_on_all(two: ProcessPool, sizes: Sizes) -> None:
    first, second = two.run(one_rank_is_wrong, sizes)
    alone = one_rank_is_wrong({})
    assert first["errors"] == second["errors"]
    assert [error is None for error in first["errors"]] == [True, False, False, False]
    assert_close(first["gradients"], alone["gradients"])


def test_requests_for_all_are_divided(two: ProcessPool) -> None:
    items = [
        Request("run", (7, 19, 3, 30), (0,) * 4).item(1, 90),
        Request("run", (5, 5, 6), (0,) * 3, whole=True).item(2, 90),
        Request("run", (11, 4, 8), (0,) * 3, "ppo").item(3, 90),
    ]
    answers, alone = two.run(own_share_of_all, SHARDS, items), own_share_of_all({}, items)
    joined = RequestShards.by_tokens(items, 2).join([results for results, _ in answers])
    for ours, theirs in zip(joined, alone[0], strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=TOLERANCE, abs=TOLERANCE)
    assert_close(answers[0][1], alone[1])
