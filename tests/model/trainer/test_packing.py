"""How requests are divided into micro-batches: the plan, and how the trainer reacts if memory runs out after all."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.models.reference import (
    assert_logprobs_close,
    assert_tensors_close,
    random_datum,
    toy_llama,
    with_random_weights,
)
from twinkle.errors import CapacityError
from twinkle.model import LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult
from twinkle.model.trainer.packing import Budget, MicroBatch, SequenceRef, halves, plan

MakeTrainer = Callable[..., Trainer]


def random_sequences(rng: random.Random, longest: int) -> list[SequenceRef]:
    return [
        SequenceRef(item, datum, rng.choice([1, longest, rng.randint(1, longest)]))
        for item in range(rng.randint(1, 9))
        for datum in range(rng.randint(1, 6))
    ]


def rows(batch: MicroBatch, padded: bool) -> int:
    lengths = [sequence.length for sequence in batch.sequences]
    return len(lengths) * max(lengths) if padded else sum(lengths)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_keeps_its_promises(seed: int, padded: bool) -> None:
    rng = random.Random(seed)
    tokens = rng.randint(1, 60)
    budget = Budget(tokens, tokens_recomputed=tokens + rng.randint(0, 60))
    sequences = random_sequences(rng, budget.longest)
    threshold = rng.choice([0, 10, 30])
    group = rng.randint(1, 4)

    def fits(items: frozenset[int]) -> bool:
        return len(items) <= group

    def length_class(length: int) -> int:
        return int(length > threshold)

    batches = plan(sequences, budget, padded=padded, length_class=length_class, fits=fits)

    planned = [sequence for batch in batches for sequence in batch.sequences]
    assert sorted(planned, key=lambda s: (s.item, s.datum)) == sequences  # every sequence exactly once
    for batch in batches:
        assert batch.sequences
        places = [sequences.index(sequence) for sequence in batch.sequences]
        assert places == sorted(places)  # in the given order, so that the rows of a request are adjacent
        assert len({length_class(sequence.length) for sequence in batch.sequences}) == 1
        assert fits(frozenset(batch.items))
        assert batch.recompute == any(sequence.length > tokens for sequence in batch.sequences)
        assert batch.recompute == all(sequence.length > tokens for sequence in batch.sequences)
        limit = budget.tokens_recomputed if batch.recompute else budget.tokens
        assert rows(batch, padded) <= limit
    for kind in {(batch.recompute, length_class(batch.sequences[0].length)) for batch in batches}:
        order = [
            sequences.index(sequence)
            for batch in batches
            if (batch.recompute, length_class(batch.sequences[0].length)) == kind
            for sequence in batch.sequences
        ]
        assert order == sorted(order)


def test_items_are_named_once_in_row_order() -> None:
    refs = [SequenceRef(item, datum, 1) for item, datum in ((4, 0), (4, 1), (2, 0), (7, 0), (7, 1))]
    assert MicroBatch(tuple(refs)).items == (4, 2, 7)


def test_what_fits_is_one_batch() -> None:
    refs = [SequenceRef(item, 0, 10) for item in range(8)]
    assert plan(refs, Budget(80, 80)) == [MicroBatch(tuple(refs))]
    assert len(plan(refs, Budget(79, 79))) == 2
    assert plan([], Budget(10, 10)) == []


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_not_more_than_needed(seed: int) -> None:
    """A batch ends when it holds an equal share of all tokens, or when the next sequence would not fit."""
    rng = random.Random(seed)
    longest, limit = 10, rng.randint(20, 100)
    refs = [SequenceRef(item, 0, rng.randint(1, longest)) for item in range(rng.randint(1, 60))]
    total = sum(ref.length for ref in refs)
    share = total / math.ceil(total / limit)
    assert len(plan(refs, Budget(limit, limit))) <= math.ceil(total / min(share, limit - longest + 1))


def test_padding_counts() -> None:
    refs = [SequenceRef(0, 0, 10), SequenceRef(0, 1, 1), SequenceRef(1, 0, 1)]
    assert len(plan(refs, Budget(12, 12))) == 1
    assert [len(batch.sequences) for batch in plan(refs, Budget(29, 29), padded=True)] == [2, 1]
    assert len(plan(refs, Budget(30, 30), padded=True)) == 1


def test_only_long_sequences_are_recomputed() -> None:
    refs = [SequenceRef(0, 0, 5), SequenceRef(0, 1, 50), SequenceRef(1, 0, 5), SequenceRef(1, 1, 40)]
    batches = plan(refs, Budget(20, 100))
    assert batches == [MicroBatch((refs[0], refs[2])), MicroBatch((refs[1], refs[3]), recompute=True)]


def test_halves_keep_everything_until_nothing_is_left_to_try() -> None:
    refs = tuple(SequenceRef(item, 0, 3) for item in range(5))
    queue, seen = [MicroBatch(refs)], []
    while queue:
        batch = queue.pop(0)
        smaller = halves(batch)
        if smaller:
            assert tuple(s for part in smaller for s in part.sequences) == batch.sequences
            queue = smaller + queue
        else:
            seen.append(batch)
    assert seen == [MicroBatch((ref,), recompute=True) for ref in refs]


# --- out of memory ----------------------------------------------------------------------------------------------------


def ready_trainer(make_trainer: MakeTrainer) -> Trainer:
    trainer = make_trainer()
    for number in range(3):
        trainer.create_adapter(str(number), LoraSpec(8, seed=number))
        trainer.restore(str(number), with_random_weights(trainer, str(number)))
    return trainer


def items(lengths: dict[str, tuple[int, ...]]) -> list[TrainItem]:
    base = toy_llama()
    return [
        TrainItem(name, [random_datum(base, "cross_entropy", length, seed=length) for length in each])
        for name, each in lengths.items()
    ]


def shrink_memory(trainer: Trainer, tokens: int, tokens_recomputed: int) -> list[int]:
    """Make larger batches run out of memory from now on; return a list that collects the sizes of the others."""
    done: list[int] = []
    inner = trainer._engine.forward_backward

    def limited(parts: object, *, recompute: bool, give_way: object = None) -> object:
        size = sum(sum(part.lengths) for part in parts)
        if size > (tokens_recomputed if recompute else tokens):
            raise torch.OutOfMemoryError("no more")
        done.append(size)
        return inner(parts, recompute=recompute)

    trainer._engine.forward_backward = limited
    return done


def test_a_batch_that_runs_out_of_memory_is_cut_and_nobody_notices(make_trainer: MakeTrainer) -> None:
    requests = items({"0": (20, 9), "1": (33,), "2": (7, 7, 12)})
    whole = ready_trainer(make_trainer)
    expected = whole.forward_backward(requests)
    short = ready_trainer(make_trainer)
    sizes = shrink_memory(short, tokens=25, tokens_recomputed=40)
    results = short.forward_backward(requests)
    assert len(sizes) > 1
    assert sum(sizes) == 88
    for ours, theirs in zip(results, expected, strict=True):
        assert isinstance(ours, TrainResult)
        assert_logprobs_close(ours.logprobs, theirs.logprobs)
    for name in ("0", "1", "2"):
        assert_tensors_close(short.gradients(name), whole.gradients(name))
    tries = len(sizes)
    short.forward_backward(items({"0": (12, 12, 12, 12)}))
    assert sizes[tries:], "it goes on"
    assert max(sizes[tries:]) <= 25  # and it remembers the limit


def test_a_sequence_that_can_never_fit_fails_alone(make_trainer: MakeTrainer) -> None:
    trainer = ready_trainer(make_trainer)
    shrink_memory(trainer, tokens=25, tokens_recomputed=40)
    results = trainer.forward_backward(items({"0": (20,), "1": (6, 50, 8), "2": (33,)}))
    assert [type(result) for result in results] == [TrainResult, TrainFailure, TrainResult]
    assert isinstance(results[1].error, CapacityError)
    assert trainer.gradients("1") == {}
    whole = ready_trainer(make_trainer)
    whole.forward_backward(items({"0": (20,), "2": (33,)}))
    for name in ("0", "2"):
        assert_tensors_close(trainer.gradients(name), whole.gradients(name))
    (again,) = trainer.forward_backward(items({"1": (6, 8)}))
    assert isinstance(again, TrainResult)


def test_the_token_budget_is_checked(make_trainer: MakeTrainer) -> None:
    for tokens in (0, -1):
        with pytest.raises(ValueError, match="max_tokens_per_batch"):
            make_trainer(max_tokens_per_batch=tokens)
    assert make_trainer(max_tokens_per_batch=7).memory.tokens == 7
    with pytest.raises(CapacityError):
        make_trainer(memory_budget_bytes=1)


def test_results_come_in_the_order_of_the_requests(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_tokens_per_batch=20)
    for number, rank in enumerate((64, 8, 16)):  # stacks are computed in the order of ranks
        trainer.create_adapter(str(number), LoraSpec(rank, seed=number))
    requests = items({"0": (5, 30, 2), "1": (11, 3), "2": (17, 1, 8)})
    results = trainer.forward_backward(requests)
    for item, result in zip(requests, results, strict=True):
        assert [lp.shape for lp in result.logprobs] == [datum.targets.shape for datum in item.data]
        (alone,) = trainer.forward([item])
        for ours, theirs in zip(result.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
