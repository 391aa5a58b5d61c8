"""Requests with their own objective, a temperature, statistics or no adapter, together with those of other tenants."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.models.reference import (
    Reference,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    toy_llama,
    with_random_weights,
)
from tests.support.models.tiny_models import the_result, tiny_model, tiny_trainer
from twinkle.errors import InvalidInputError, NonFiniteError, UnsupportedError
from twinkle.model import (
    Datum,
    LoraSpec,
    ObjectiveValue,
    TokenValues,
    Trainer,
    TrainFailure,
    TrainItem,
)

BASE = toy_llama()
SPEC = LoraSpec(rank=4, alpha=8.0, seed=1)


def squared_sum(values: Sequence[TokenValues]) -> ObjectiveValue:
    """L = ½ (Σ lp)² − 3 Σ_i i·Σ lp_i: every slope depends on all sequences and on the sequence's position."""
    total = sum(float(value.logprobs.sum()) for value in values)
    slopes = [np.full_like(value.logprobs, total - 3 * place) for place, value in enumerate(values)]
    weighted = sum(3 * place * float(value.logprobs.sum()) for place, value in enumerate(values))
    return ObjectiveValue(0.5 * total**2 - weighted, slopes)


def trainer_with(names: Sequence[str], **options) -> Trainer:
    trainer = tiny_trainer(BASE, **options)
    for seed, name in enumerate(names):
        trainer.create_adapter(name, SPEC)
        trainer.restore(name, with_random_weights(trainer, name, seed))
    return trainer


def data(*lengths: int, seed: int = 0, model=BASE) -> list[Datum]:
    made = [random_datum(model, "cross_entropy", length, seed * 50 + i) for i, length in enumerate(lengths)]
    return [Datum(datum.tokens, datum.targets) for datum in made]


def plain_squared_sum(reference: Reference, item: TrainItem) -> float:
    sums = torch.stack([target_logprobs(reference.model, datum).sum() for datum in item.data])
    loss = 0.5 * sums.sum() ** 2 - 3 * (sums * torch.arange(len(sums))).sum()
    loss.backward()
    return loss.item()


def plain_gradients(reference: Reference) -> dict[str, np.ndarray]:
    return {name: parameter.grad.numpy() for name, parameter in reference._parameters.items()}


@pytest.mark.parametrize("limit", [None, 20], ids=["one batch", "several batches"])
def test_an_objective_sees_its_whole_request(limit):
    trainer = trainer_with(["a"], max_tokens_per_batch=limit)
    item = TrainItem("a", data(9, 13, 5, 13), objective=squared_sum)
    reference = Reference(BASE, SPEC, trainer.weights("a"))
    result = the_result(trainer.forward_backward([item])[0])
    assert result.metrics["loss:sum"] == pytest.approx(plain_squared_sum(reference, item), rel=1e-5)
    assert_tensors_close(trainer.gradients("a"), plain_gradients(reference))
    evaluated = the_result(trainer.forward([item])[0])
    assert evaluated.metrics["loss:sum"] == pytest.approx(result.metrics["loss:sum"], rel=1e-6)


def test_order_survives_a_padded_model():
    """Padded models sort sequences by length; the objective must still get them in the request's order."""
    model = tiny_model("lfm2")
    trainer = tiny_trainer(model)
    assert trainer.architecture.padded
    trainer.create_adapter("a", SPEC)
    trainer.restore("a", with_random_weights(trainer, "a"))
    item = TrainItem("a", data(9, 5, 12, 5, model=model), objective=squared_sum)
    reference = Reference(model, SPEC, trainer.weights("a"))
    result = the_result(trainer.forward_backward([item])[0])
    assert result.metrics["loss:sum"] == pytest.approx(plain_squared_sum(reference, item), rel=1e-5)
    assert_tensors_close(trainer.gradients("a"), plain_gradients(reference), 3e-5)


@pytest.mark.parametrize("limit", [None, 24], ids=["one batch", "several batches"])
def test_company_changes_nothing(limit):
    items = [
        TrainItem("a", data(9, 7), objective=squared_sum, temperature=0.5),
        TrainItem("b", [random_datum(BASE, "gspo", 11, 3)], "gspo"),
        TrainItem("c", [random_datum(BASE, "cross_entropy", 8, 4, width=3)]),
        TrainItem("d", data(6, 6, seed=2), statistics=True),
    ]
    names = [item.adapter_id for item in items]
    together = trainer_with(names, max_tokens_per_batch=limit)
    results = [the_result(each) for each in together.forward_backward(items)]
    for item, result in zip(items, results, strict=True):
        alone = trainer_with(names)
        expected = the_result(alone.forward_backward([item])[0])
        assert_numbers_close(result.metrics["loss:sum"], expected.metrics["loss:sum"])
        assert_tensors_close(together.gradients(item.adapter_id), alone.gradients(item.adapter_id))


def test_a_failing_objective_fails_alone():
    def refuses(values):
        raise InvalidInputError("advantages", None, "numbers")

    def infinite(values):
        return ObjectiveValue(float("inf"), [np.ones_like(value.logprobs) for value in values])

    items = [
        TrainItem("a", data(9), objective=refuses),
        TrainItem("b", data(7), objective=infinite),
        TrainItem("c", data(8)),
    ]
    trainer, alone = trainer_with("abc"), trainer_with("abc")
    first, second, third = trainer.forward_backward(items)
    assert isinstance(first, TrainFailure)
    assert isinstance(first.error, InvalidInputError)
    assert isinstance(second, TrainFailure)
    assert isinstance(second.error, NonFiniteError)
    assert trainer.gradients("a") == trainer.gradients("b") == {}
    the_result(alone.forward_backward(items[2:])[0])
    the_result(third)
    assert_tensors_close(trainer.gradients("c"), alone.gradients("c"))


def test_statistics_are_entropy_and_the_likeliest_token():
    trainer = trainer_with(["a"])
    item = TrainItem("a", data(9, 4), statistics=True, temperature=1.5)
    result = the_result(trainer.forward([item])[0])
    reference = Reference(BASE, SPEC, trainer.weights("a"))
    for datum, values in zip(item.data, result.values, strict=True):
        with torch.no_grad():
            logits = reference.model(torch.from_numpy(datum.tokens)[None]).logits[0].double() / 1.5
        logprobs = logits.log_softmax(-1)
        assert_numbers_close(values.entropies, -(logprobs.exp() * logprobs).sum(-1).numpy())
        assert_numbers_close(
            values.logprobs, logprobs.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0].numpy()
        )
        assert (values.predictions == logits.argmax(-1).numpy()).all()


def test_entropy_has_a_gradient():
    def entropy_sum(values):
        zeros = [np.zeros_like(value.logprobs) for value in values]
        slopes = [np.full_like(value.entropies, 2.0) for value in values]
        return ObjectiveValue(2.0 * sum(float(value.entropies.sum()) for value in values), zeros, slopes)

    trainer = trainer_with(["a"])
    item = TrainItem("a", data(9, 6), objective=entropy_sum, statistics=True)
    the_result(trainer.forward_backward([item])[0])
    reference = Reference(BASE, SPEC, trainer.weights("a"))
    for datum in item.data:
        logprobs = reference.model(torch.from_numpy(datum.tokens)[None]).logits[0].log_softmax(-1)
        (-2.0 * (logprobs.exp() * logprobs).sum()).backward()
    assert_tensors_close(trainer.gradients("a"), plain_gradients(reference))


def test_the_base_model_beside_adapters():
    trainer = trainer_with("ab")
    items = [
        TrainItem("a", data(9)),
        TrainItem("a", data(9), base_model=True),
        TrainItem("b", data(9)),
    ]
    a, base, b = (the_result(each).logprobs[0] for each in trainer.forward(items))
    assert_numbers_close(base, target_logprobs(BASE, items[1].data[0]).detach().numpy())
    assert_numbers_close(a, the_result(trainer.forward(items[:1])[0]).logprobs[0])
    assert np.abs(a - base).max() > 1e-3
    assert np.abs(a - b).max() > 1e-3
    failure = trainer.forward_backward(items[1:2])[0]
    assert isinstance(failure, TrainFailure)
    assert "base_model" in str(failure.error)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"objective": squared_sum, "loss_config": {"beta": 1.0}}, "beta"),
        ({"statistics": True, "wide": True}, "targets"),
    ],
)
def test_mistakes_are_named(options, field):
    trainer = trainer_with(["a"])
    options = dict(options)
    wide = [random_datum(BASE, "cross_entropy", 5, 0, width=2)] if options.pop("wide", False) else data(5)
    outcome = trainer.forward_backward([TrainItem("a", wide, **options)])[0]
    assert isinstance(outcome, TrainFailure)
    assert field in str(outcome.error)
    assert not isinstance(outcome.error, UnsupportedError)
