"""A call in steps: others compute between its micro-batches, and everybody gets what they would have got alone."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.packing import MicroBatch, SequenceRef, cut
from twinkle.model.types import ObjectiveValue, TokenValues

MakeTrainer = Callable[..., Trainer]
Steps = Generator[None, None, list[Any]]
RNG = np.random.default_rng(0)
VOCAB = 97


def random_datum(length: int) -> Datum:
    return Datum(RNG.integers(0, VOCAB, length), RNG.integers(0, VOCAB, length))


LONG = [random_datum(20) for _ in range(10)]
SHORT = [random_datum(12)]


def gradient(trainer: Trainer, adapter_id: str) -> np.ndarray:
    return np.concatenate([each.ravel() for each in trainer.gradients(adapter_id).values()])


def with_adapters(make_trainer: MakeTrainer) -> Trainer:
    trainer = make_trainer()
    for number, name in enumerate(("long", "short")):
        trainer.create_adapter(name, LoraSpec(rank=4, seed=number))
    return trainer


def finished(steps: Steps, between: Callable[[], None] = lambda: None) -> tuple[int, list[Any]]:
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1
        between()


def test_others_compute_and_step_between_the_steps(make_trainer: MakeTrainer) -> None:
    whole, stepped = with_adapters(make_trainer), with_adapters(make_trainer)
    (expected,) = whole.forward_backward([TrainItem("long", LONG)])
    losses: list[float] = []

    def step_of_another() -> None:
        (result,) = stepped.forward_backward([TrainItem("short", SHORT)])
        assert isinstance(result, TrainResult)
        losses.append(result.metrics["loss:sum"])
        stepped.optim_step("short", AdamParams(learning_rate=1e-2))
        assert not stepped.gradients("long"), "until its end it has changed nothing"

    steps = stepped.in_steps([TrainItem("long", LONG)], train=True, limit=lambda: 45)
    count, (result,) = finished(steps, step_of_another)
    assert count == 5, "two sequences of twenty tokens a step"
    assert losses == sorted(losses, reverse=True)
    assert isinstance(expected, TrainResult)
    assert isinstance(result, TrainResult)
    for ours, theirs in zip(result.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient(stepped, "long"), gradient(whole, "long"), rtol=1e-3, atol=1e-5)


def test_without_a_limit_it_is_one_step_with_the_same_bits(make_trainer: MakeTrainer) -> None:
    whole, stepped = with_adapters(make_trainer), with_adapters(make_trainer)
    whole.forward_backward([TrainItem("long", LONG)])
    count, _ = finished(stepped.in_steps([TrainItem("long", LONG)], train=True, limit=lambda: None))
    assert count == 1
    assert np.array_equal(gradient(stepped, "long"), gradient(whole, "long"))


def test_an_objective_in_steps(make_trainer: MakeTrainer) -> None:
    """Its sequences do not fit one step: they are looked at first, in steps too."""
    whole, stepped = with_adapters(make_trainer), with_adapters(make_trainer)

    def squares(values: Sequence[TokenValues]) -> ObjectiveValue:
        total = sum(float((value.logprobs**2).sum()) for value in values)
        return ObjectiveValue(total, [2 * value.logprobs for value in values])

    item = TrainItem("long", [Datum(datum.tokens, datum.targets) for datum in LONG], objective=squares)
    whole.forward_backward([item])
    count, _ = finished(stepped.in_steps([item], train=True, limit=lambda: 45))
    assert count == 9, "five to look, five to learn; the last of the first and the first of the last are one step"
    np.testing.assert_allclose(gradient(stepped, "long"), gradient(whole, "long"), rtol=1e-3, atol=1e-5)


def test_cutting_keeps_every_sequence_in_order() -> None:
    batch = MicroBatch(tuple(SequenceRef(0, number, length) for number, length in enumerate((5, 5, 30, 1, 9, 9))))
    parts = cut(batch, 10)
    assert [[each.length for each in part.sequences] for part in parts] == [[5, 5], [30], [1, 9], [9]]
    assert cut(batch, None) == [batch]
