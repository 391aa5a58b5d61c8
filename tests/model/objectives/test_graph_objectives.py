"""Loss graphs in the trainer: the same gradients as the function under autograd, however batches are composed."""

import numpy as np
import pytest
import torch

from tests.support.losses.traced import decode_graph, request
from tests.support.models.reference import (
    Reference,
    assert_numbers_close,
    assert_tensors_close,
    random_datum,
    target_logprobs,
    toy_llama,
    with_random_weights,
)
from tests.support.models.tiny_models import the_result, tiny_trainer
from twinkle.errors import UserError
from twinkle.model import Datum, LoraSpec, Trainer, TrainFailure, TrainItem
from twinkle.model.objectives.graph_objective import GraphObjective

BASE = toy_llama()
SPEC = LoraSpec(rank=4, alpha=8.0, seed=1)


def narrow(logprobs, w):
    loss = (w * torch.exp(logprobs)).sum() + logprobs[1:].std()
    return loss, {"custom/loss:mean": loss}


def wide(logprobs, w):
    return -(w * logprobs.log_softmax(-1)).sum(), {}


def fragile(logprobs, w):
    return torch.log(logprobs * w).sum(), {}


def item(name: str, function, widths: list[int | None], seed: int = 0) -> TrainItem:
    made = [random_datum(BASE, "cross_entropy", 5 + 4 * n, seed + n, width=w) for n, w in enumerate(widths)]
    data = [Datum(datum.tokens, datum.targets) for datum in made]
    inputs = [{"w": np.random.default_rng(seed + 9).uniform(0.5, 1, d.targets.shape).astype(np.float32)} for d in data]
    rank = data[0].targets.ndim
    graph = decode_graph(request(function, {"logprobs": rank, "w": rank}))
    return TrainItem(name, data, objective=GraphObjective.for_data(graph, data, inputs))


def trainer_with(names: str, **options) -> Trainer:
    trainer = tiny_trainer(BASE, **options)
    for seed, name in enumerate(names):
        trainer.create_adapter(name, SPEC)
        trainer.restore(name, with_random_weights(trainer, name, seed))
    return trainer


CASES = {"narrow": (narrow, [None, None, None]), "wide": (wide, [3, 2, 3])}


@pytest.mark.parametrize("limit", [None, 20], ids=["one batch", "several batches"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_autograds(case: str, limit: int | None) -> None:
    function, widths = CASES[case]
    asked = item("a", function, widths)
    trainer = trainer_with("a", max_tokens_per_batch=limit)
    reference = Reference(BASE, SPEC, trainer.weights("a"))
    result = the_result(trainer.forward_backward([asked])[0])
    losses = [
        function(target_logprobs(reference.model, datum), torch.from_numpy(inputs["w"]))[0]
        for datum, inputs in zip(asked.data, asked.objective.inputs, strict=True)
    ]
    torch.stack(losses).sum().backward()
    assert result.metrics["loss:sum"] == pytest.approx(float(sum(losses)), rel=1e-5)
    if "custom/loss:mean" in result.metrics:
        assert result.metrics["custom/loss:mean"] == pytest.approx(float(sum(losses)) / len(losses), rel=1e-5)
    gradients = {name: parameter.grad.numpy() for name, parameter in reference._parameters.items()}
    assert_tensors_close(trainer.gradients("a"), gradients)


@pytest.mark.parametrize("limit", [None, 24], ids=["one batch", "several batches"])
def test_company_changes_nothing_and_failures_stay_alone(limit: int | None) -> None:
    items = [
        item("a", narrow, [None, None]),
        item("b", wide, [3, 2], seed=20),
        item("c", fragile, [None], seed=40),
        TrainItem("d", [random_datum(BASE, "cross_entropy", 8, 4, width=4)]),
    ]
    together = trainer_with("abcd", max_tokens_per_batch=limit)
    results = together.forward_backward(items)
    failed = results[2]
    assert isinstance(failed, TrainFailure)
    assert isinstance(failed.error, UserError)
    assert "nan" in str(failed.error)
    assert together.gradients("c") == {}
    for number in (0, 1, 3):
        alone = trainer_with("abcd")
        expected = the_result(alone.forward_backward([items[number]])[0])
        assert_numbers_close(the_result(results[number]).metrics["loss:sum"], expected.metrics["loss:sum"])
        name = items[number].adapter_id
        assert_tensors_close(together.gradients(name), alone.gradients(name))
