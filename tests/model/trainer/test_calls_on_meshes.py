"""Calls whose micro-batches run through a pipeline, or on ranks that hold the cuts of one model.

The pipeline here is one engine that computes the micro-batches of a group one after another, and the ranks are threads:
what is tested is how a call is planned, agreed on, and put together again.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.model.trainer.test_objectives_in_trainer import squared_sum
from tests.support.models.reference import assert_tensors_close, random_datum, toy_llama, with_random_weights
from tests.support.models.tiny_models import the_result, tiny_trainer
from twinkle.errors import CapacityError, InvalidInputError
from twinkle.loss import get_loss
from twinkle.model import Datum, LoraSpec, Trainer, TrainFailure, TrainItem
from twinkle.model.objectives.validation import CheckedDatum, CheckedItem
from twinkle.model.parallel import Parallelism, Ranks
from twinkle.model.trainer.agreement import agree_on_plan, contents_digest
from twinkle.model.trainer.batch import Part
from twinkle.model.trainer.call import TrainerCall
from twinkle.model.trainer.engine import Computed, Engine
from twinkle.model.trainer.packing import Budget, MicroBatch, SequenceRef, plan, schedules

T = TypeVar("T")

BASE = toy_llama()
SPECS = {"small": LoraSpec(4, seed=1), "wide": LoraSpec(12, seed=2), "head": LoraSpec(8, seed=3, train_unembed=True)}


class FakePipeline:
    """Computes the micro-batches of a group in order, and remembers how many each group had."""

    def __init__(self, engine: Engine, fewest: int, most: int) -> None:
        self.fewest, self.most = fewest, most
        self.groups: list[int] = []
        self._engine = engine

    def forward(self, batches: Sequence[Sequence[Part]]) -> list[Computed]:
        self._begin(batches)
        return [self._engine.forward(parts) for parts in batches]

    def forward_backward(self, batches: Sequence[Sequence[Part]], recompute: Sequence[bool]) -> list[Computed]:
        self._begin(batches)
        pairs = zip(batches, recompute, strict=True)
        return [self._engine.forward_backward(parts, recompute=again) for parts, again in pairs]

    def _begin(self, batches: Sequence[Sequence[Part]]) -> None:
        self.groups.append(len(batches))
        adapters = [part.adapter for parts in batches for part in parts if part.adapter is not None]
        assert all(adapter.slot is not None for adapter in adapters), "all adapters of a group must be resident"


class ThreadRanks:
    """One of several threads that communicate like ranks."""

    group = None

    def __init__(self, size: int, number: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.size, self.number, self._barrier, self._board = size, number, barrier, board

    def gather(self, value: T) -> list[T]:
        self._board[self.number] = value
        self._barrier.wait(120)
        values = list(self._board)
        self._barrier.wait(120)
        return values

    def smallest(self, value: int) -> int:
        return min(self.gather(value))

    def total(self, value: float) -> float:
        return sum(self.gather(value))

    def add_up(self, tensor: Any) -> None:
        raise NotImplementedError

    copy_from_first = add_up


def on_threads(size: int, program: Callable[[Ranks], T]) -> list[T | Exception]:
    """Run a program on each of several ranks; return its results or exceptions."""
    barrier, board = threading.Barrier(size), [None] * size

    def run(number: int) -> T | Exception:
        try:
            return program(ThreadRanks(size, number, barrier, board))
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def make_trainer(**options: int) -> Trainer:
    trainer = tiny_trainer(BASE, **options)
    for seed, (name, spec) in enumerate(SPECS.items()):
        trainer.create_adapter(name, spec)
        trainer.restore(name, with_random_weights(trainer, name, seed))
    return trainer


def data(*lengths: int, loss: str = "cross_entropy", seed: int = 0) -> list[Datum]:
    return [random_datum(BASE, loss, length, seed * 50 + number) for number, length in enumerate(lengths)]


def requests() -> list[TrainItem]:
    """Return requests with pointwise losses, one over sequences, and an objective over the whole request."""
    plain = [Datum(datum.tokens, datum.targets) for datum in data(7, 9, 12, seed=4)]
    return [
        TrainItem("small", data(5, 17, 3, seed=1)),
        TrainItem("wide", data(11, 4, loss="gspo", seed=2), loss="gspo", statistics=True),
        TrainItem("head", data(30, 2, seed=3), temperature=1.5),
        TrainItem("small", plain, objective=squared_sum),
    ]


def run_call(trainer: Trainer, items: Sequence[TrainItem], *, train: bool = True, **options: Any) -> list[Any]:
    call = TrainerCall(trainer.engine, trainer.pool, trainer._budget, train=train, **options)
    return call.run(items)


# --- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (4, 32), (4, 3)])
def test_a_pipelined_call_gives_the_same_results(fewest: int, most: int) -> None:
    plain, piped = make_trainer(), make_trainer()
    expected = [the_result(result) for result in plain.forward_backward(requests())]
    pipeline = FakePipeline(piped.engine, fewest, most)

    results = [the_result(result) for result in run_call(piped, requests(), pipeline=pipeline)]

    for ours, theirs in zip(results, expected, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
        assert_tensors_close(dict(enumerate(ours.logprobs)), dict(enumerate(theirs.logprobs)))
        assert len(ours.values) == len(theirs.values)
    for name in SPECS:
        assert_tensors_close(piped.gradients(name), plain.gradients(name))
    assert sum(pipeline.groups) >= fewest
    assert max(pipeline.groups) <= most
    scores = zip(run_call(piped, requests(), train=False, pipeline=pipeline), plain.forward(requests()), strict=True)
    for ours, theirs in scores:
        assert the_result(ours).metrics == pytest.approx(the_result(theirs).metrics, rel=1e-5)


def test_a_failing_request_in_a_pipeline_fails_alone() -> None:
    plain, piped = make_trainer(), make_trainer()
    snapshot = piped.snapshot("wide")
    snapshot.weights[:] = np.nan
    piped.restore("wide", snapshot)
    plain.forward_backward([requests()[0]])
    items = [requests()[0], requests()[1], TrainItem("head", [])]

    good, nan, empty = run_call(piped, items, pipeline=FakePipeline(piped.engine, 4, 16))

    the_result(good)
    assert isinstance(nan, TrainFailure)
    assert isinstance(empty, TrainFailure)
    assert_tensors_close(piped.gradients("small"), plain.gradients("small"))
    assert piped.gradients("wide") == {}


def test_a_plan_has_enough_micro_batches_for_a_pipeline() -> None:
    sequences = [SequenceRef(item, datum, 10) for item in range(3) for datum in range(4)]
    budget = Budget(1000, 1000)
    assert len(plan(sequences, budget)) == 1
    assert [len(batch.sequences) for batch in plan(sequences, budget, at_least=4)] == [3, 3, 3, 3]
    assert len(plan(sequences[:3], budget, at_least=4)) == 3  # no more than there are sequences
    assert len(plan(sequences, Budget(20, 20), at_least=4)) == 6  # more than that, if memory asks for it


@pytest.mark.parametrize("seed", range(20))
def test_a_pipeline_is_filled_with_about_equal_micro_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 50, rng.integers(1, 20))
    sequences = [SequenceRef(number // 3, number % 3, int(length)) for number, length in enumerate(lengths)]
    batches = plan(sequences, Budget(2000, 2000), at_least=4)
    assert [each for batch in batches for each in batch.sequences] == sequences
    assert len(batches) >= min(4, len(sequences))
    assert max(batch.tokens for batch in batches) <= sum(lengths) / min(4, len(sequences)) + max(lengths)


def test_micro_batches_run_together_as_far_as_their_adapters_fit() -> None:
    batches = [MicroBatch((SequenceRef(item, 0, 5), SequenceRef(item + 1, 0, 5))) for item in range(5)]
    assert [len(group) for group in schedules(batches, 3, lambda items: True)] == [3, 2]
    assert [len(group) for group in schedules(batches, 9, lambda items: len(items) <= 3)] == [2, 2, 1]
    assert [len(group) for group in schedules(batches, 9, lambda items: len(items) <= 2)] == [1] * 5
    assert schedules([], 3, lambda items: True) == []


# --- ranks of one model -----------------------------------------------------------------------------------------------


def test_ranks_of_one_model_run_the_same_call() -> None:
    expected = [the_result(result) for result in make_trainer(max_tokens_per_batch=25).forward_backward(requests())]

    def program(ranks: Ranks) -> Any:
        trainer = make_trainer(max_tokens_per_batch=25)
        if ranks.number:  # residency, and so the slots of adapters, may differ between ranks
            trainer.forward([TrainItem("head", data(3)), TrainItem("small", data(3))])
        results = run_call(trainer, requests(), parallel=Parallelism(ranks, model=ranks))
        return results, trainer.pool.get("small").divided, trainer.pool.get("small").passes

    for outcome in on_threads(2, program):
        assert not isinstance(outcome, Exception), outcome
        results, divided, passes = outcome
        assert divided
        assert passes == 2
        for ours, theirs in zip(results, expected, strict=True):
            assert the_result(ours).metrics == pytest.approx(theirs.metrics, rel=1e-5)


def differ(change: Callable[[int], list[TrainItem]]) -> list[Any]:
    """Run a call in which each rank has other requests."""

    def program(ranks: Ranks) -> Any:
        trainer = make_trainer()
        parallel = Parallelism(ranks, model=ranks)
        return run_call(trainer, change(ranks.number), parallel=parallel)

    return on_threads(2, program)


@pytest.mark.parametrize(
    "change",
    [
        lambda rank: [TrainItem(("small", "wide")[rank], data(5))],
        lambda rank: [TrainItem("small", data(5, (6, 7)[rank]))],
        lambda rank: [TrainItem("small", data(5, seed=rank))],
        lambda rank: [TrainItem("small", data(5), temperature=(1.0, 2.0)[rank])],
        lambda rank: [TrainItem("small", data(5, loss="gspo"), loss=("gspo", "ppo")[rank])],
        lambda rank: [TrainItem("small", data(5)), TrainItem("small", data(5))][: 2 - rank],
    ],
    ids=["adapter", "length", "tokens", "temperature", "loss", "count"],
)
def test_different_requests_on_ranks_of_one_model_are_an_error_on_all(
    change: Callable[[int], list[TrainItem]],
) -> None:
    for outcome in differ(change):
        assert isinstance(outcome, InvalidInputError), outcome


def test_a_request_that_one_rank_refuses_fails_on_all_before_it_is_computed() -> None:
    wrong = Datum(np.array([1, 97]), np.array([1, 2]))
    outcomes = differ(lambda rank: [TrainItem("small", [wrong] if rank else data(5)), TrainItem("wide", data(6))])
    for outcome in outcomes:
        assert not isinstance(outcome, Exception), outcome
        assert isinstance(outcome[0], TrainFailure)
        assert "97" in str(outcome[0].error)
        the_result(outcome[1])


def make_plan(most: int) -> list[tuple[MicroBatch, ...]]:
    batches = plan(
        [SequenceRef(item, 0, 5) for item in range(8)], Budget(99, 99), fits=lambda items: len(items) <= most
    )
    return [(batch,) for batch in batches]


def test_a_plan_fits_all_ranks() -> None:
    """Ranks hold different cuts, so adapters that fit together on one may not fit on another."""
    outcomes = on_threads(
        3, lambda ranks: agree_on_plan(ranks, make_plan, lambda items: len(items) <= 8 - 2 * ranks.number, repr)
    )
    assert outcomes[0] == outcomes[1] == outcomes[2] == make_plan(4)


def test_a_plan_that_fits_nowhere_is_an_error_on_all_ranks() -> None:
    outcomes = on_threads(2, lambda ranks: agree_on_plan(ranks, make_plan, lambda items: ranks.number == 0, repr))
    assert [type(outcome) for outcome in outcomes] == [CapacityError] * 2


def test_ranks_that_understand_a_plan_differently_notice() -> None:
    outcomes = on_threads(
        2, lambda ranks: agree_on_plan(ranks, make_plan, lambda items: True, lambda made: str(ranks.number))
    )
    assert [type(outcome) for outcome in outcomes] == [InvalidInputError] * 2


def test_the_digest_of_a_requests_contents_has_its_routes() -> None:
    """Ranks that replay different routes would not compute the same sequences."""
    tokens = np.arange(3)
    given = [None, np.zeros((3, 2, 1), np.int16), np.ones((3, 2, 1), np.int16), np.zeros((3, 1, 2), np.int16)]
    digests = []
    for routes in given:
        datum = CheckedDatum(tokens, tokens[:, None], {}, (3,), routes=routes)
        item = CheckedItem("a", get_loss("cross_entropy"), {}, (datum,))
        digests += [contents_digest(dataclasses.replace(item, records_routes=each), "", None) for each in (False, True)]
    assert len(set(digests)) == len(digests)
