"""A request of a full-parameter run that fails leaves no gradient and changes nothing; calls in steps give the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.full.plain_run import RUN, PlainRun, full_trainer, request, the_result, with_run
from tests.support.models.reference import assert_numbers_close, assert_tensors_close, toy_llama
from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CapacityError,
    InvalidInputError,
    NonFiniteError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
)
from twinkle.model import (
    AdamParams,
    Datum,
    FullSpec,
    FullTrainer,
    LoraSpec,
    ObjectiveValue,
    TokenValues,
    TrainFailure,
    TrainItem,
)

BASE = toy_llama()
VOCAB = BASE.config.vocab_size
GOOD = request(BASE, 1, 12, 7)


@pytest.fixture(scope="module")
def shared() -> FullTrainer:
    return with_run(BASE)


@pytest.fixture
def trainer(shared: FullTrainer) -> FullTrainer:
    """Returns a trainer with a fresh run."""
    for adapter_id in shared.adapter_ids():
        shared.remove_adapter(adapter_id)
    shared.create_adapter(RUN, FullSpec())
    return shared


def weighted(weight: float) -> TrainItem:
    """Return a request whose second sequence has this weight at every other token, and minus the weight at others."""
    tokens, signs = np.arange(3, 27), np.where(np.arange(24) % 2, -1.0, 1.0)
    return TrainItem(RUN, [GOOD.data[0], Datum(tokens, tokens[::-1].copy(), (weight * signs).astype(np.float32))])


def broken(values: Sequence[TokenValues]) -> ObjectiveValue:
    raise InvalidInputError("objective", "this", "another one")


BAD: Mapping[str, tuple[Any, type[TwinkleError]]] = {
    "a token that the model does not have": (
        TrainItem(RUN, [GOOD.data[0], Datum(np.array([1, VOCAB]), np.array([1, 2]))]),
        InvalidInputError,
    ),
    "unequal lengths": (TrainItem(RUN, [Datum(np.array([1, 2]), np.array([1]))]), InvalidInputError),
    "no data": (TrainItem(RUN, []), InvalidInputError),
    "an unknown loss": (replace(GOOD, loss="none"), TwinkleError),
    "a loss without its inputs": (replace(GOOD, loss="ppo"), InvalidInputError),
    "a loss that overflows": (weighted(1e38), NonFiniteError),
    "a gradient that overflows": (weighted(2e37), NonFiniteError),
    "an objective that fails": (replace(GOOD, objective=broken), InvalidInputError),
    "another run": (replace(GOOD, adapter_id="other"), AdapterNotFoundError),
    "the base model": (replace(GOOD, base_model=True), InvalidInputError),
    "no request": ("hello", InvalidInputError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_fails_leaves_no_gradient(trainer: FullTrainer, name: str) -> None:
    """It fails alone: those before and after it in the call, and a gradient from before, count as if it were not."""
    bad, error = BAD[name]
    weights = trainer.weights(RUN)
    (failure,) = trainer.forward_backward([bad])
    assert isinstance(failure, TrainFailure), failure
    assert isinstance(failure.error, error), failure.error
    assert trainer.gradients(RUN) == {}
    assert trainer.optim_step(RUN, AdamParams())["no_gradient:max"] == 1.0
    assert_tensors_close(trainer.weights(RUN), weights, 0.0)

    later = request(BASE, 2, 5)
    first, failure, last = trainer.forward_backward([GOOD, bad, later])
    assert isinstance(failure, TrainFailure)
    assert not isinstance(first, TrainFailure)
    assert not isinstance(last, TrainFailure)
    plain = PlainRun(BASE)
    plain.forward_backward(GOOD)
    plain.forward_backward(later)
    assert_tensors_close(trainer.gradients(RUN), plain.gradients())


def test_the_overflow_is_named(trainer: FullTrainer) -> None:
    """The loss of the second request is finite, and its gradient is not."""
    loss, gradient = trainer.forward_backward([weighted(1e38), weighted(2e37)])
    assert "loss 'cross_entropy' is" in str(loss.error)
    assert str(gradient.error) == "the gradient holds NaN or infinity: it was not kept"


def test_a_step_with_wrong_settings_changes_nothing(trainer: FullTrainer) -> None:
    trainer.forward_backward([GOOD])
    weights, gradients = trainer.weights(RUN), trainer.gradients(RUN)
    for params, name in (
        (AdamParams(learning_rate=-1.0), "learning_rate"),
        (AdamParams(beta1=1.0), "beta1"),
        (AdamParams(eps=0.0), "eps"),
        (AdamParams(weight_decay=float("nan")), "weight_decay"),
    ):
        with pytest.raises(InvalidInputError, match=name):
            trainer.optim_step(RUN, params)
    with pytest.raises(UnknownNameError, match="Rprop"):
        trainer.optimizer_step(RUN, "Rprop", {"lr": 0.1})
    with pytest.raises(InvalidInputError, match="SGD"):
        trainer.optimizer_step(RUN, "SGD", {"lr": -0.1})
    with pytest.raises(UnsupportedError, match=r"Muon trains matrices only.* 5 that are none.*layernorm"):
        trainer.optimizer_step(RUN, "Muon", {"lr": 0.1})
    assert trainer.step_count(RUN) == 0
    assert_tensors_close(trainer.weights(RUN), weights, 0.0)
    assert_tensors_close(trainer.gradients(RUN), gradients, 0.0)


def test_a_gradient_that_overflows_in_sum_takes_no_step(trainer: FullTrainer) -> None:
    trainer.forward_backward([GOOD])
    trainer.scale_gradient(RUN, 1e38)
    trainer.scale_gradient(RUN, 1e38)
    weights = trainer.weights(RUN)
    with pytest.raises(NonFiniteError, match="no step taken"):
        trainer.optim_step(RUN, AdamParams())
    assert_tensors_close(trainer.weights(RUN), weights, 0.0)
    trainer.zero_grad(RUN)
    assert trainer.gradients(RUN) == {}


def test_an_objective_of_all_sequences(trainer: FullTrainer) -> None:
    """Half of the squared distance of the two sequences' sums: it cannot be computed sequence by sequence."""

    def distance(values: Sequence[TokenValues]) -> ObjectiveValue:
        first, second = (float(value.logprobs.sum(dtype=np.float64)) for value in values)
        slopes = (first - second, second - first)
        arrays = [np.full(len(value.logprobs), slope, np.float32) for value, slope in zip(values, slopes, strict=True)]
        return ObjectiveValue(0.5 * (first - second) ** 2, arrays)

    item = request(BASE, 4, 11, 8, objective=distance)
    result = the_result(trainer.forward_backward([item]))
    plain = PlainRun(BASE)
    logits = [plain.model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0] for datum in item.data]
    sums = [
        each.log_softmax(-1).gather(1, torch.from_numpy(datum.targets)[:, None]).sum()
        for each, datum in zip(logits, item.data, strict=True)
    ]
    loss = 0.5 * (sums[0] - sums[1]) ** 2
    loss.backward()
    assert_numbers_close(result.metrics["loss:sum"], loss.item())
    assert_tensors_close(trainer.gradients(RUN), plain.gradients(), 2e-5)  # the slope is a difference of rounded sums


# --- steps ------------------------------------------------------------------------------------------------------------


def finished(steps: Any, between: Callable[[], None] = lambda: None) -> tuple[int, list[Any]]:
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1
        between()


@pytest.mark.parametrize("train", [True, False], ids=["training", "forward"])
def test_a_call_in_steps_gives_the_same(trainer: FullTrainer, train: bool) -> None:
    items = [request(BASE, 1, 9, 14, 6), replace(GOOD, adapter_id="other"), request(BASE, 2, 20)]
    whole = (trainer.forward_backward if train else trainer.forward)(items)
    gradients = trainer.gradients(RUN)
    trainer.zero_grad(RUN)
    seen: list[str] = []
    count, stepped = finished(
        trainer.in_steps(items, train=train, limit=lambda: 10), lambda: seen.extend(trainer.adapter_ids())
    )
    assert count > 3
    assert seen == [RUN] * (count - 1)
    for ours, theirs in zip(stepped, whole, strict=True):
        assert type(ours) is type(theirs)
        if not isinstance(ours, TrainFailure):
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)
    assert_tensors_close(trainer.gradients(RUN), gradients)


def test_steps_that_are_given_up_leave_no_gradient(trainer: FullTrainer) -> None:
    steps = trainer.in_steps([request(BASE, 1, 9, 14, 6)], train=True, limit=lambda: 10)
    next(steps)
    steps.close()
    assert trainer.gradients(RUN) == {}
    the_result(trainer.forward_backward([GOOD]))
    plain = PlainRun(BASE)
    plain.forward_backward(GOOD)
    assert_tensors_close(trainer.gradients(RUN), plain.gradients())


@pytest.mark.parametrize("most", [20, 6])
def test_a_pass_without_memory_begins_again_with_less(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Batches of more than ``most`` tokens do not fit; the first of them is computed to the end before it fails.

    Sequences longer than that fit only if they are recomputed, which the second case needs.
    """
    trainer, plain = with_run(BASE), PlainRun(BASE)
    engine, failed = trainer._model.engine, []
    compute = engine.forward_backward

    def limited(parts: Any, *, recompute: bool, give_way: Any = None) -> Any:
        computed = compute(parts, recompute=recompute, give_way=give_way)
        tokens = sum(length for part in parts for length in part.lengths)
        if tokens > most and not (recompute and tokens <= 9):
            failed.append(tokens)
            raise torch.OutOfMemoryError
        return computed

    monkeypatch.setattr(engine, "forward_backward", limited)
    item = request(BASE, 5, 8, 9, 4, 7)
    result = the_result(trainer.forward_backward([item]))
    assert failed
    assert_numbers_close(result.metrics["loss:sum"], plain.forward_backward(item).loss)
    assert_tensors_close(trainer.gradients(RUN), plain.gradients())


def test_a_sequence_that_never_fits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = with_run(BASE)
    engine, compute = trainer._model.engine, trainer._model.engine.forward_backward

    def limited(parts: Any, *, recompute: bool, give_way: Any = None) -> Any:
        if any(length > 20 for part in parts for length in part.lengths):
            raise torch.OutOfMemoryError
        return compute(parts, recompute=recompute, give_way=give_way)

    monkeypatch.setattr(engine, "forward_backward", limited)
    failure, result = trainer.forward_backward([request(BASE, 1, 7, 25), GOOD])
    assert isinstance(failure, TrainFailure)
    assert isinstance(failure.error, CapacityError), failure.error
    assert not isinstance(result, TrainFailure)
    plain = PlainRun(BASE)
    plain.forward_backward(GOOD)
    assert_tensors_close(trainer.gradients(RUN), plain.gradients())


# --- one run at a time ------------------------------------------------------------------------------------------------


def test_one_run_holds_the_model() -> None:
    trainer = full_trainer(BASE)
    with pytest.raises(UnsupportedError, match=r"spec: got LoraSpec, allowed: FullSpec, because this model trains all"):
        trainer.create_adapter(RUN, LoraSpec(8))
    assert trainer.adapter_ids() == []
    assert not isinstance(trainer.forward([replace(GOOD, base_model=True)])[0], TrainFailure)
    assert trainer.create_adapter(RUN, FullSpec()) == trainer.spec(RUN) == FullSpec()
    with pytest.raises(AdapterExistsError):
        trainer.create_adapter(RUN, FullSpec())
    with pytest.raises(CapacityError, match="one run at a time"):
        trainer.create_adapter("other", FullSpec())
    with pytest.raises(CapacityError, match="one run at a time"):
        trainer.restore("other", trainer.snapshot(RUN))
    with pytest.raises(UnsupportedError, match="no LoRA adapter"):
        trainer.peft_config(RUN)
    (failure,) = trainer.forward([replace(GOOD, base_model=True)])
    assert isinstance(failure, TrainFailure)
    assert "base_model" in str(failure.error)
    assert trainer.adapter_ids() == trainer.resident_adapter_ids() == [RUN]
    for use in (trainer.weights, trainer.step_count, trainer.remove_adapter, trainer.snapshot, trainer.zero_grad):
        with pytest.raises(AdapterNotFoundError):
            use("other")
