"""Several processes train adapters to the same weights as one process."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.model.parallel.lora_programs import (
    Request,
    Sizes,
    different_requests,
    drawn_seed,
    gradient_looked_at,
    numbers_held,
    one_rank_breaks,
    one_rank_is_wrong,
    own_share_of_all,
    train,
)
from tests.model.parallel.process_pool import ProcessPool
from twinkle.model import TrainFailure, TrainItem
from twinkle.model.trainer.shard_requests import RequestShards

TOLERANCE = 1e-5  # fp32: the bound on what may differ from plain torch

DATA, SHARDS, BOTH = {"dp_size": 2}, {"dp_size": 1, "fsdp_size": 2}, {"dp_size": 2, "fsdp_size": 2}
SPREADS = pytest.mark.parametrize("sizes", [DATA, SHARDS], ids=["dp", "fsdp"])


def assert_same_training(
    together: list[dict[str, Any]], alone: Mapping[str, Any], of_weights: float = TOLERANCE
) -> None:
    """``of_weights``: the bound on differences of weights after the steps."""
    for name in ("small", "head"):
        assert_close(together[0]["weights"][name], alone["weights"][name], of_weights)
        assert_close(together[0]["gradients"][name], alone["gradients"][name])
        assert_close(together[0]["moments"][name], alone["moments"][name])
        for other in together[1:]:  # replicas are equal bit by bit
            assert_equal(other["weights"][name], together[0]["weights"][name])
            assert_equal(other["moments"][name], together[0]["moments"][name])
    losses = np.sum([each["losses"] for each in together], 0)
    np.testing.assert_allclose(losses, alone["losses"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(together[0]["norms"], alone["norms"], rtol=TOLERANCE, atol=TOLERANCE)
    scored = [array for each in together for array in each["scored"]]
    for ours, theirs in zip(scored, alone["scored"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert all(each["steps"] == alone["steps"] for each in together)


def assert_close(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        error = np.linalg.norm(ours[name] - wanted) / max(np.linalg.norm(wanted), 1e-30)
        assert error <= tolerance, f"{name}: {error:.1e}"


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        np.testing.assert_array_equal(ours[name], wanted, err_msg=name)


@SPREADS
def test_a_vision_model_trains_on_text(two: ProcessPool, sizes: Sizes) -> None:
    """Some of its gradients are so small that their rounding decides about a step of Adam, which divides by their size.

    So weights get a wider bound than gradients.
    """
    assert_same_training(two.run(train, sizes, "qwen2_vl"), train({}, "qwen2_vl"), of_weights=1e-4)


@SPREADS
def test_two_processes_train_as_one(two: ProcessPool, sizes: Sizes) -> None:
    assert_same_training(two.run(train, sizes, "toy"), train({}, "toy"))


def test_requests_for_all_are_divided(two: ProcessPool) -> None:
    items = [
        Request("small", (7, 19, 3, 30), (0,) * 4).item(1, 90),
        Request("head", (5, 5, 6), (0,) * 3, whole=True).item(2, 90),
        Request("head", (11, 4, 8), (0,) * 3, "ppo").item(3, 90),
        TrainItem("small", [], "cross_entropy"),
    ]
    answers, alone = two.run(own_share_of_all, DATA, items), own_share_of_all({}, items)
    joined = RequestShards.by_tokens(items, 2).join([results for results, _ in answers])
    for ours, theirs in zip(joined[:3], alone[0][:3], strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=TOLERANCE, abs=TOLERANCE)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    assert isinstance(joined[3], TrainFailure)
    for name in ("small", "head"):
        assert_close(answers[0][1][name], alone[1][name])


@SPREADS
def test_what_fails_on_one_rank_fails_on_all(two: ProcessPool, sizes: Sizes) -> None:
    alone = one_rank_is_wrong({})
    for each in two.run(one_rank_is_wrong, sizes):
        assert each["errors"][0] is None
        for text, wanted in zip(
            each["errors"][1:], ("data[0].tokens", "something else", "data", "unknown"), strict=True
        ):
            assert wanted in text
        assert_close(each["gradients"]["good"], alone["gradients"]["good"])
        assert all(each["gradients"][name] == {} for name in ("bad", "refused", "empty"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_breaks_is_named_on_the_others(failing: int) -> None:
    pool = ProcessPool(2)  # its processes have no group any more afterwards
    try:
        answers = pool.run(one_rank_breaks, failing)
    finally:
        pool.close()
    for errors in answers:
        assert len(errors) == 2
        assert all(error.startswith(f"rank {failing} failed: ZeroDivisionError: a bug\n") for error in errors), errors


def test_ranks_with_different_requests_are_told(two: ProcessPool) -> None:
    for text in two.run(different_requests, DATA):
        assert "small" in text
        assert "head" in text


def test_a_gradient_can_be_looked_at_while_its_window_is_open(two: ProcessPool) -> None:
    together, alone = two.run(gradient_looked_at, DATA), gradient_looked_at({})
    for each in together:
        assert each["norm"] == pytest.approx(alone["norm"], rel=TOLERANCE)
        assert_close(each["weights"], alone["weights"])


def test_a_seed_that_was_drawn_is_drawn_once(two: ProcessPool) -> None:
    first, second = two.run(drawn_seed, DATA)
    assert first == second


def test_shards_are_parts(two: ProcessPool) -> None:
    for held, count in two.run(numbers_held, SHARDS):
        assert held < 0.51 * count


@pytest.mark.parallel
@SPREADS
def test_two_processes_train_a_wide_model_as_one(two: ProcessPool, sizes: Sizes) -> None:
    assert_same_training(two.run(train, sizes, "wide"), train({}, "wide"))


@pytest.mark.parallel
@pytest.mark.parametrize("model", ["toy", "wide"])
@pytest.mark.parametrize("sizes", [{"dp_size": 4}, {"dp_size": 1, "fsdp_size": 4}, BOTH], ids=["dp", "fsdp", "both"])
def test_four_processes_train_as_one(four: ProcessPool, sizes: Sizes, model: str) -> None:
    assert_same_training(four.run(train, sizes, model), train({}, model))


@pytest.mark.parallel
def test_embeddings_that_are_the_head_are_sharded_too(two: ProcessPool) -> None:
    assert_same_training(two.run(train, SHARDS, "toy", True), train({}, "toy", True))
