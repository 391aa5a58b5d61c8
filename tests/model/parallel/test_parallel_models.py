"""Several processes train the library's models to the same weights as one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.model.parallel.full_programs import (
    PASSES,
    Program,
    dropout_gradients,
    feature,
    full_model,
    loss_by_hand,
    multi_lora_and_back,
    multi_lora_goes_on,
    one_rank_has_nonsense,
    resume_full,
    save_and_go_on_full,
    save_model,
    train_checkpointed,
    train_full,
    train_mean,
    train_multi_lora,
    train_on_images,
    train_peft,
)
from tests.model.parallel.lora_programs import Sizes
from tests.model.parallel.process_pool import ProcessPool
from tests.model.parallel.test_parallel_lora import BOTH, DATA, SHARDS, SPREADS, TOLERANCE, assert_close, assert_equal

FOUR = pytest.mark.parametrize(
    "sizes", [{"dp_size": 4}, {"dp_size": 1, "fsdp_size": 4}, BOTH], ids=["dp", "fsdp", "both"]
)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("toy", str(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("wide", str(tmp_path_factory.mktemp("wide")))


def assert_same_model(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert_close(together[0]["weights"], alone["weights"])
    for other in together[1:]:
        assert_equal(other["weights"], together[0]["weights"])
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=TOLERANCE)
    assert sum(each["logps"] for each in together) == alone["logps"]
    for each in together:
        metrics = zip(each["metrics"], alone["metrics"], strict=True)
        for ours, theirs in (*metrics, (each["evaluation"], alone["evaluation"])):
            assert _numbers(ours) == pytest.approx(_numbers(theirs), abs=2e-4)  # metrics are rounded


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


@SPREADS
@pytest.mark.parametrize("program", [train_full, train_peft])
def test_two_processes_train_a_model_as_one(two: ProcessPool, sizes: Sizes, program: Program, toy: str) -> None:
    assert_same_model(two.run(program, sizes, toy), program({}, toy))


@SPREADS
def test_adapters_of_the_library(two: ProcessPool, sizes: Sizes, toy: str) -> None:
    together, alone = two.run(train_multi_lora, sizes, toy), train_multi_lora({}, toy)
    for name in ("a", "b"):
        assert_same_model([each[name] for each in together], alone[name])


@SPREADS
def test_dropout_is_that_of_one_process(two: ProcessPool, sizes: Sizes, toy: str) -> None:
    """Which elements are dropped depends on the number of a row in the whole batch."""
    alone = dropout_gradients({}, toy)
    for each in two.run(dropout_gradients, sizes, toy):
        assert_close(each, alone)


@SPREADS
def test_a_window_survives_a_checkpoint(two: ProcessPool, sizes: Sizes, toy: str, tmp_path: Path) -> None:
    alone = train_full({}, toy)
    went_on = two.run(save_and_go_on_full, sizes, toy, str(tmp_path))
    resumed = two.run(resume_full, sizes, str(tmp_path))
    by_one = resume_full({}, str(tmp_path))  # one process can resume it, too
    for trained in (went_on, resumed, [by_one]):
        assert_same_model([_from_step(each, 0) for each in trained], _from_step(alone, 1))
    summary = {"cur_step": 3, "consumed_train_samples": 7, "gradient_accumulation_steps": 2}
    assert [each["summary"] for each in (*resumed, by_one)] == [summary] * 3


@SPREADS
def test_an_adapter_goes_on_from_a_checkpoint(two: ProcessPool, sizes: Sizes, toy: str, tmp_path: Path) -> None:
    alone = _from_step(train_multi_lora({}, toy)["a"], 1)
    resumed = two.run(multi_lora_and_back, sizes, toy, str(tmp_path))
    by_one = multi_lora_goes_on({}, toy, str(tmp_path))
    for trained in (resumed, [by_one]):
        assert_same_model([_from_step(each, 0) for each in trained], alone)


@SPREADS
def test_verbs_one_by_one(two: ProcessPool, sizes: Sizes, toy: str) -> None:
    together, alone = two.run(loss_by_hand, sizes, toy), loss_by_hand({}, toy)
    for kind in ("full", "lora"):
        assert_close(together[1][kind], alone[kind])


@SPREADS
def test_nonsense_on_one_rank_is_refused_on_all(two: ProcessPool, sizes: Sizes, toy: str) -> None:
    first, last = two.run(one_rank_has_nonsense, sizes, toy)
    assert first == last
    assert "1000000" in first[0]
    assert "the loss is nan" in first[1]
    assert len(first) == 3


def test_means_are_averaged_over_ranks_with_data(two: ProcessPool, toy: str) -> None:
    """Pass 0 has data on both ranks, pass 1 on one rank, whose gradient is then not averaged."""
    one = two.run(train_mean, {"dp_size": 2}, toy)[0]
    model = full_model({}, toy)
    model.set_loss("CrossEntropyLoss", reduction="mean")
    batch = [feature(length, k) for k, length in enumerate(PASSES[0][0])]
    model.forward_backward(inputs=batch[:1], gradient_accumulation_steps=2)
    model.forward_backward(inputs=batch[1:])
    assert one["norms"][0] == pytest.approx(model.clip_grad_and_step(0.5), rel=TOLERANCE)
    model.forward_backward(inputs=[feature(6, 1000), feature(23, 1001)], gradient_accumulation_steps=1)
    assert one["norms"][1] == pytest.approx(model.clip_grad_and_step(0.5), rel=TOLERANCE)
    assert_close(one["weights"], {name: each.detach().numpy() for name, each in model.get_state_dict().items()})


def _from_step(trained: dict[str, Any], first: int) -> dict[str, Any]:
    return {**trained, "norms": trained["norms"][first:], "metrics": []}


@pytest.mark.parallel
@SPREADS
@pytest.mark.parametrize("program", [train_full, train_peft])
def test_two_processes_train_a_wide_model(two: ProcessPool, sizes: Sizes, program: Program, wide: str) -> None:
    assert_same_model(two.run(program, sizes, wide), program({}, wide))


@pytest.mark.parallel
@FOUR
@pytest.mark.parametrize("program", [train_full, train_peft])
def test_four_processes_train_a_model(four: ProcessPool, sizes: Sizes, program: Program, toy: str) -> None:
    assert_same_model(four.run(program, sizes, toy), program({}, toy))


@pytest.mark.parallel
@FOUR
def test_four_processes_train_a_wide_model(four: ProcessPool, sizes: Sizes, wide: str) -> None:
    assert_same_model(four.run(train_full, sizes, wide), train_full({}, wide))


@pytest.mark.parallel
@FOUR
def test_adapters_of_the_library_in_four(four: ProcessPool, sizes: Sizes, toy: str) -> None:
    together, alone = four.run(train_multi_lora, sizes, toy), train_multi_lora({}, toy)
    for name in ("a", "b"):
        assert_same_model([each[name] for each in together], alone[name])


@pytest.mark.parallel
def test_a_window_of_replicas_and_shards_survives(four: ProcessPool, toy: str, tmp_path: Path) -> None:
    alone = _from_step(train_full({}, toy), 1)
    four.run(save_and_go_on_full, BOTH, toy, str(tmp_path))
    resumed = four.run(resume_full, BOTH, str(tmp_path))
    assert_same_model([_from_step(each, 0) for each in resumed], alone)


@pytest.mark.parallel
def test_shards_with_recomputed_activations(two: ProcessPool, toy: str) -> None:
    assert_same_model(two.run(train_checkpointed, SHARDS, toy), train_checkpointed({}, toy))


@pytest.mark.parallel
@SPREADS
def test_embeddings_that_are_the_head(two: ProcessPool, sizes: Sizes, tmp_path: Path) -> None:
    tied = save_model("toy", str(tmp_path), tied=True)
    assert_same_model(two.run(train_full, sizes, tied), train_full({}, tied))


@pytest.mark.parallel
def test_a_model_of_ours(two: ProcessPool) -> None:
    assert_same_model(two.run(train_full, SHARDS, "random://llama-tiny"), train_full({}, "random://llama-tiny"))


@pytest.mark.parametrize(
    ("kind", "sizes"), [("all", SHARDS), ("peft", SHARDS), ("many", DATA)], ids=["all", "peft", "many"]
)
def test_two_processes_see_as_one(two: ProcessPool, kind: str, sizes: Sizes) -> None:
    together, alone = two.run(train_on_images, sizes, kind), train_on_images({}, kind)
    assert_close(together[0]["weights"], alone["weights"])
    assert_equal(together[1]["weights"], together[0]["weights"])
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=TOLERANCE)
