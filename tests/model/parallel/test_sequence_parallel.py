"""Ranks that divide sequences among them (Ulysses) compute what one process computes, with and without shards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.parallel.lora_programs import Sizes
from tests.model.parallel.process_pool import ProcessPool
from tests.model.parallel.sequence_programs import (
    PASSES,
    embed,
    go_on_in_a_window,
    one_pass,
    refused,
    save_in_a_window,
    save_llama,
    train,
)
from tests.model.parallel.test_parallel_lora import TOLERANCE, assert_close, assert_equal
from tests.support.models.tiny_models import FAMILIES, LONG, tiny_model
from twinkle import hub
from twinkle.errors import UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.loss import ChunkedCrossEntropyLoss, GRPOLoss, Loss
from twinkle.model import MultiLoraTransformersModel, Trainer
from twinkle.model.parallel import ALONE
from twinkle.model.transformers.sequence_parallel import RowSlice, check_lengths, check_model, divide_heads

WHOLE = {"dp_size": 2, "ulysses_size": 2}
SHARDS = {"dp_size": 1, "fsdp_size": 2, "ulysses_size": 2}
PLACES = pytest.mark.parametrize("sizes", [WHOLE, SHARDS], ids=["dp", "fsdp"])
FOUR = pytest.mark.parametrize(
    "sizes",
    [
        {"dp_size": 4, "ulysses_size": 2},
        {"dp_size": 1, "fsdp_size": 4, "ulysses_size": 2},
        {"dp_size": 2, "fsdp_size": 2, "ulysses_size": 2},
        {"dp_size": 4, "ulysses_size": 4},
        {"dp_size": 2, "fsdp_size": 2, "ulysses_size": 4},
    ],
    ids=["dp", "fsdp", "both", "dp-of-four", "both-of-four"],
)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with four query heads and one key/value head: fewer than processes."""
    return save_llama(tmp_path_factory.mktemp("toy"))


def assert_same(together: list[dict[str, Any]], alone: dict[str, Any], sizes: Sizes) -> None:
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    groups = mesh.get_sequence_groups()
    for name in ("losses", "tokens"):
        for group in groups:  # all ranks of a group return the loss of all its rows
            assert [together[rank][name] for rank in group] == [together[group[0]][name]] * len(group)
        totals = np.sum([together[group[0]][name] for group in groups], 0)
        np.testing.assert_allclose(totals, alone[name], rtol=TOLERANCE, atol=TOLERANCE)
    for each in together:
        np.testing.assert_allclose(each["norms"], alone["norms"], rtol=TOLERANCE)
        for ours, theirs in zip(each["gradients"], alone["gradients"], strict=True):
            assert_close(ours, theirs)
        for ours, theirs in zip(each["metrics"], alone["metrics"], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-4)  # metrics are rounded
        assert_equal(each["weights"], together[0]["weights"])
    assert_close(together[0]["weights"], alone["weights"])
    if len(groups) == 1:
        for each in together:
            _assert_same_numbers(each["evaluation"], alone["evaluation"])


def _assert_same_numbers(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        np.testing.assert_allclose(ours[name], wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def assert_same_pass(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for each in together:
        assert each["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE, abs=TOLERANCE)
        assert_close(each["gradients"], alone["gradients"])


@PLACES
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_two_processes_with_the_same_rows_train_as_one(two: ProcessPool, sizes: Sizes, lora: bool, toy: str) -> None:
    assert all(sum(map(sum, lengths)) % 2 for lengths, _ in PASSES)  # no row divides
    assert_same(two.run(train, sizes, toy, lora), train({}, toy, lora), sizes)


def test_a_packed_batch(two: ProcessPool, toy: str) -> None:
    found = two.run(train, SHARDS, toy, False, True, True)  # also with recomputed activations
    assert_same(found, train({}, toy), SHARDS)


def test_padding_changes_nothing(two: ProcessPool, toy: str) -> None:
    """Tokens that fill up a row, and tokens in the padding of the inputs, can have any value."""
    clean = two.run(one_pass, WHOLE, toy)
    assert sum((9, 12, 6)) % 2  # the row must be filled up
    for each, other in zip(clean, two.run(one_pass, WHOLE, toy, None, 41, 13), strict=True):
        assert (each["loss"], each["tokens"]) == (other["loss"], other["tokens"])
        assert_equal(other["outputs"], each["outputs"])
        assert_equal(other["gradients"], each["gradients"])
    alone = one_pass({}, toy)
    assert clean[0]["tokens"] == alone["tokens"] == 9 + 12 + 6 - 3 * 3  # of 3 rows: prompts of 2, last tokens
    assert_same_pass(clean, alone)


def test_rows_that_differ_are_refused_on_all_ranks(two: ProcessPool, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_llama(tmp_path / "plain"))
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config.max_position_embeddings = 32
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dynamic")
    first, second = two.run(refused, WHOLE, str(tmp_path / "dynamic"))
    assert first == second
    assert "different rows on ranks of one sequence group" in first[0]
    assert "LlamaForCausalLM (llama): a sequence has 40 tokens, allowed: 32" in first[1]
    assert len(first) == 3


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (9, 3), (12, 6), (14, 2), (5, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_head_is_computed_once_with_its_keys(heads: tuple[int, int], ranks: int) -> None:
    queries, keys = heads
    found = []
    for each in divide_heads(queries, keys, ranks):
        numbers = list(range(each.keys.start, each.keys.stop))
        repeats = each.query_count // each.key_count
        used = [n for n in numbers for _ in range(repeats)]
        if each.expanded is not None:
            used = [numbers[n] for n in each.expanded]
        found += list(zip(range(each.queries.start, each.queries.stop), used, strict=True))
    assert found == [(head, head // (queries // keys)) for head in range(queries)]


def test_a_row_in_one_process_is_not_cut() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hub.resolve("random://llama-tiny").path))
    row = RowSlice.cut((3, 4), ALONE, model.device)
    assert (row.start, row.size, row.tokens, row.packing.lengths) == (0, 7, 7, (3, 4))
    assert row.positions().tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 99, "each rank needs a query head, and there are"),
        ({"attention_dropout": 0.1}, 2, "attention_dropout is 0.1, allowed: 0"),
        ({"model_type": "unheard_of"}, 2, "only these families have been tested with it: gemma, "),
        ({"output_router_logits": True}, 2, "an auxiliary loss"),
    ],
)
def test_models_that_cannot_be_cut(changes: dict[str, Any], ranks: int, reason: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(hub.resolve("random://llama-tiny").path))
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedError, match=f"ulysses_size={ranks} for LlamaForCausalLM .*{reason}"):
        check_model(model, ranks)


def test_rotary_frequencies_that_depend_on_the_batch_set_a_limit() -> None:
    model = tiny_model("phi3-longrope")
    check_lengths((3, LONG), model)
    with pytest.raises(UnsupportedError, match=f"a sequence has {LONG + 1} tokens, allowed: {LONG}"):
        check_lengths((3, LONG + 1), model)
    check_lengths((10**6,), tiny_model("llama"))


def test_models_with_state_along_the_sequence_cannot_be_cut() -> None:
    with pytest.raises(UnsupportedError, match=r"Qwen3_5ForCausalLM \(qwen3_5_text\): its layers carry state along"):
        check_model(tiny_model("qwen3_5"), 2)


@pytest.mark.parametrize("model", [MultiLoraTransformersModel, Trainer.from_pretrained])
def test_adapters_of_many_tenants_do_not_take_it(model: Any) -> None:
    mesh = DeviceMesh.from_sizes(**WHOLE, device_type="cpu")
    with pytest.raises(UnsupportedError, match=r"ulysses_size=2: .*TransformersModel also by ulysses_size"):
        model(model_id="random://llama-tiny", device="cpu", device_mesh=mesh)


# --- more models, losses and processes --------------------------------------------------------------------------------


@pytest.mark.parallel
@PLACES
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (5, 1), (6, 2)], ids=str)
def test_numbers_of_heads(two: ProcessPool, sizes: Sizes, heads: tuple[int, int], tmp_path: Path) -> None:
    model = save_llama(tmp_path, heads)
    assert_same(two.run(train, sizes, model), train({}, model), sizes)


@pytest.mark.parallel
@PLACES
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_wide_model(two: ProcessPool, sizes: Sizes, lora: bool, tmp_path: Path) -> None:
    model = save_llama(tmp_path, (8, 1), wide=True)
    assert_same(two.run(train, sizes, model, lora), train({}, model, lora), sizes)


@pytest.mark.parallel
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3_5", "qwen3_5_moe", "phi3-longrope"}))
def test_families(two: ProcessPool, family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    assert_same(two.run(train, SHARDS, str(tmp_path)), train({}, str(tmp_path)), SHARDS)


@pytest.mark.parallel
@PLACES
@pytest.mark.parametrize("loss", [ChunkedCrossEntropyLoss(5), GRPOLoss(entropy_coef=0.1)], ids=["logits", "entropies"])
def test_losses_of_more_than_log_probabilities(two: ProcessPool, sizes: Sizes, loss: Loss, toy: str) -> None:
    assert_same_pass(two.run(one_pass, sizes, toy, loss), one_pass({}, toy, loss))


@pytest.mark.parallel
@PLACES
def test_losses_of_embeddings(two: ProcessPool, sizes: Sizes, toy: str) -> None:
    together, alone = two.run(embed, sizes, toy), embed({}, toy)
    assert_same_pass(together, alone)
    for each in together:
        np.testing.assert_allclose(each["embeddings"], alone["embeddings"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parallel
@PLACES
def test_a_window_survives_a_checkpoint(two: ProcessPool, sizes: Sizes, toy: str, tmp_path: Path) -> None:
    alone = train({}, toy)
    two.run(save_in_a_window, sizes, toy, str(tmp_path / "two"))
    save_in_a_window({}, toy, str(tmp_path / "one"))
    found = [*two.run(go_on_in_a_window, sizes, str(tmp_path / "one"))]
    found += [*two.run(go_on_in_a_window, sizes, str(tmp_path / "two")), go_on_in_a_window({}, str(tmp_path / "two"))]
    for each in found:
        np.testing.assert_allclose(each["norms"], alone["norms"][1:], rtol=TOLERANCE)
        assert_close(each["weights"], alone["weights"])


@pytest.mark.parallel
@FOUR
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_four_processes(four: ProcessPool, sizes: Sizes, lora: bool, toy: str) -> None:
    assert_same(four.run(train, sizes, toy, lora), train({}, toy, lora), sizes)


@pytest.mark.parallel
@FOUR
def test_four_processes_with_two_key_heads(four: ProcessPool, sizes: Sizes, tmp_path: Path) -> None:
    model = save_llama(tmp_path, (6, 2))  # six query heads on four processes: 2, 2, 1, 1
    assert_same(four.run(train, sizes, model), train({}, model), sizes)
