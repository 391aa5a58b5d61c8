"""A call in steps: other calls compute between its micro-batches, and every result is the same as alone."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest

from twinkle.model import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult
from twinkle.model.trainer.packing import Budget, MicroBatch, SequenceRef, cut
from twinkle.model.types import ObjectiveValue, TokenValues

MakeTrainer = Callable[..., Trainer]
Steps = Generator[None, None, list[Any]]
RNG = np.random.default_rng(0)
VOCAB = 97


def random_datum(length: int) -> Datum:
    return Datum(RNG.integers(0, VOCAB, length), RNG.integers(0, VOCAB, length))


LONG = [random_datum(20) for _ in range(10)]
SHORT = [random_datum(8)]
LONG_SEQUENCE = random_datum(20)


def gradient(trainer: Trainer, adapter_id: str) -> np.ndarray:
    return np.concatenate([each.ravel() for each in trainer.gradients(adapter_id).values()])


def with_adapters(make_trainer: MakeTrainer, kept: int = 4096, recomputed: int = 4096) -> Trainer:
    trainer = make_trainer()
    trainer._budget = Budget(kept, recomputed)
    trainer.engine.head.chunk_rows = 8
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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kept", [40, 39, 10], ids=["kept", "recomputed to leave room", "recomputed"])
def test_others_compute_and_step_in_the_middle_of_one_sequence(
    make_trainer: MakeTrainer, train: bool, kept: int
) -> None:
    """Other calls run between layers, between chunks of the head, and in the backward pass.

    No bit of a result changes.
    """
    item = TrainItem("long", [LONG_SEQUENCE])
    whole, stepped, other = (with_adapters(make_trainer, kept, 40) for _ in range(3))
    (expected,) = whole.forward_backward([item]) if train else whole.forward([item])
    losses: list[float] = []

    def step_of_another(trainer: Trainer) -> float:
        (result,) = trainer.forward_backward([TrainItem("short", SHORT)])
        assert isinstance(result, TrainResult)
        trainer.optim_step("short", AdamParams(learning_rate=1e-2))
        return result.metrics["loss:sum"]

    steps = stepped.in_steps(
        [item], train=train, limit=lambda: 45, give_way=lambda: losses.append(step_of_another(stepped))
    )
    count, (result,) = finished(steps)
    assert count == 1
    layers, chunks = stepped.architecture.layer_count, 3
    assert len(losses) == layers * (1 + train) + chunks
    assert losses == [step_of_another(other) for _ in losses]
    assert isinstance(expected, TrainResult)
    assert isinstance(result, TrainResult)
    assert np.array_equal(result.logprobs[0], expected.logprobs[0])
    if train:
        assert np.array_equal(gradient(stepped, "long"), gradient(whole, "long"))


def test_others_have_the_other_half_of_the_memory(make_trainer: MakeTrainer) -> None:
    """Other calls may also have sequences longer than half the memory."""
    trainer = with_adapters(make_trainer, 40, 40)
    sizes: list[int] = []
    engine = trainer.engine
    forward = engine.forward
    longer = [random_datum(8) for _ in range(5)] + [random_datum(30)]

    def measured(parts: Sequence[Any], give_way: Callable[[], None] | None = None) -> Any:
        sizes.append(sum(sum(part.lengths) for part in parts))
        return forward(parts, give_way)

    def others() -> None:
        if not sizes:
            engine.forward = measured  # type: ignore[method-assign]
            (result,) = trainer.forward([TrainItem("short", longer)])
            assert isinstance(result, TrainResult)

    item = TrainItem("long", [LONG_SEQUENCE])
    finished(trainer.in_steps([item], train=True, limit=lambda: None, give_way=others))
    assert sorted(sizes)[-1] == 30
    assert all(size <= 20 for size in sizes if size != 30)
    assert trainer._budget == Budget(40, 40)


def test_adapters_that_leave_the_device_in_the_middle_of_a_pass_are_not_missed(make_trainer: MakeTrainer) -> None:
    """Other calls may need the memory: the adapter is paged out, and its slot is used by another one."""
    whole, stepped = with_adapters(make_trainer), with_adapters(make_trainer)
    (result,) = whole.forward_backward([TrainItem("long", [LONG_SEQUENCE])])
    assert isinstance(result, TrainResult)
    slots: list[int | None] = []

    def take_its_place() -> None:
        for name in ("long", "short"):
            stepped.pool._page_out(stepped.pool.get(name))
        stepped.forward([TrainItem("short", SHORT)])
        slots.append(stepped.pool.get("short").slot)

    item = TrainItem("long", [LONG_SEQUENCE])
    finished(stepped.in_steps([item], train=True, limit=lambda: None, give_way=take_its_place))
    assert set(slots) == {0}, "where the other one was"
    assert np.array_equal(gradient(stepped, "long"), gradient(whole, "long"))


def test_a_sequence_that_needs_the_memory_of_two_is_not_interrupted(make_trainer: MakeTrainer) -> None:
    trainer = with_adapters(make_trainer, 39, 39)

    def never() -> None:
        raise AssertionError("two batches of this size do not fit")

    item = TrainItem("long", [LONG_SEQUENCE])
    _, (result,) = finished(trainer.in_steps([item], train=True, limit=lambda: None, give_way=never))
    assert isinstance(result, TrainResult)


def test_without_a_limit_it_is_one_step_with_the_same_bits(make_trainer: MakeTrainer) -> None:
    whole, stepped = with_adapters(make_trainer), with_adapters(make_trainer)
    whole.forward_backward([TrainItem("long", LONG)])
    count, _ = finished(stepped.in_steps([TrainItem("long", LONG)], train=True, limit=lambda: None))
    assert count == 1
    assert np.array_equal(gradient(stepped, "long"), gradient(whole, "long"))


def test_an_objective_in_steps(make_trainer: MakeTrainer) -> None:
    """The objective's sequences do not fit in one step, so the forward pass before it also runs in steps."""
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
