"""Samples that are drawn in the middle of a training pass: neither the training nor the samples change by one bit."""

from collections.abc import Callable, Generator

import numpy as np
import pytest

from tests.support.models.sampling import SPECS, assert_nothing_left, prompt, request, toy_sampler, toy_trainer
from tests.support.models.tiny_models import VOCAB, tiny_model
from twinkle.errors import UserError
from twinkle.model import AdamParams, Datum, Trainer, TrainItem, TrainResult
from twinkle.model.trainer.packing import Budget
from twinkle.sampler import Finished, SampleRequest, SampleResult, TorchSampler


def datum(length: int, seed: int) -> Datum:
    tokens = np.random.default_rng(seed).integers(3, VOCAB, (2, length))
    return Datum(tokens[0], tokens[1])


# Two passes of two adapters and of the base model, which has no adapter and only a forward pass.
PASSES = [
    [
        TrainItem("a", [datum(20, 0), datum(9, 1)]),
        TrainItem("b", [datum(14, 2)]),
    ],
    [
        TrainItem("a", [datum(11, 3)]),
        TrainItem("b", [datum(20, 4), datum(3, 5)]),
    ],
]
BASE = TrainItem("a", [datum(16, 6)], base_model=True)
REQUESTS = [
    request("base", None, prompt(30), max_tokens=12, seed=1),
    request("own", "a", prompt(9, 1), 2, max_tokens=15, seed=2),  # a version of the adapter that is being trained
    request("other", "c", prompt(17, 2), max_tokens=9, temperature=0.0, seed=3),
]


def new(name: str) -> tuple[Trainer, TorchSampler]:
    trainer = toy_trainer(SPECS, None if name == "llama" else tiny_model(name))
    trainer.engine.head.chunk_rows = 8
    return trainer, toy_sampler(trainer)


def in_one_call(
    trainer: Trainer, items: list[TrainItem], give_way: Callable[[], None], *, train: bool = True
) -> list[TrainResult]:
    calls: Generator[None, None, list] = trainer.in_steps(items, train=train, limit=None, give_way=give_way)
    with pytest.raises(StopIteration) as end:  # without a limit there is one step
        next(calls)
    assert all(isinstance(each, TrainResult) for each in end.value.value)
    return end.value.value


def trained(trainer: Trainer, give_way: Callable[[], None] | None) -> list[np.ndarray]:
    """Accumulate two passes, take a step, pass over the base model, and return everything that was computed."""
    computed: list[np.ndarray] = []
    for items in PASSES:
        results = trainer.forward_backward(items) if give_way is None else in_one_call(trainer, items, give_way)
        computed += [logprobs for result in results for logprobs in result.logprobs]
    for name in ("a", "b"):
        computed += list(trainer.gradients(name).values())
        trainer.optim_step(name, AdamParams(learning_rate=1e-2))
        computed += list(trainer.weights(name).values())
    last = trainer.forward([BASE]) if give_way is None else in_one_call(trainer, [BASE], give_way, train=False)
    return computed + last[0].logprobs


class Sampling:
    """Keeps a sampler busy with the same requests again and again, one short turn at each call."""

    def __init__(self, sampler: TorchSampler, requests: list[SampleRequest]) -> None:
        self.calls = 0
        self.results: list[tuple[str, SampleResult]] = []
        self._sampler, self._requests = sampler, requests

    def __call__(self) -> None:
        self.calls += 1
        if not self._sampler.busy:
            for each in self._requests:
                self._sampler.submit(each)
        self.results += [(e.request_id, e.outcome) for e in self._sampler.step() if isinstance(e, Finished)]

    def finish(self) -> None:
        while self._sampler.busy:
            self.results += [(e.request_id, e.outcome) for e in self._sampler.step() if isinstance(e, Finished)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_neither_changes_by_one_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    trainer, sampler = new(name)
    sampling = Sampling(sampler, REQUESTS)
    computed = trained(trainer, sampling)
    sampling.finish()
    # Before each of the layers, in the backward pass after each of them, and between the chunks of the head.
    assert sampling.calls > 2 * 2 * trainer.architecture.layer_count
    assert_nothing_left(sampler)

    alone, sampler_alone = new(name)
    undisturbed = Sampling(sampler_alone, REQUESTS)
    for _ in range(sampling.calls):
        undisturbed()
    undisturbed.finish()
    for ours, theirs in zip(computed, trained(alone, None), strict=True):
        assert np.array_equal(ours, theirs)
    for (name, result), (name_alone, result_alone) in zip(sampling.results, undisturbed.results, strict=True):
        assert name == name_alone
        for ours, theirs in zip(result.sequences, result_alone.sequences, strict=True):
            assert np.array_equal(ours.tokens, theirs.tokens)
            assert np.array_equal(ours.logprobs, theirs.logprobs)


def test_requests_that_are_cancelled_or_refused_in_the_middle_change_nothing() -> None:
    alone, _ = new("llama")
    expected = trained(alone, None)
    trainer, sampler = new("llama")
    errors: list[Exception] = []

    def disturb() -> None:
        for number, length in enumerate((5, 40)):
            sampler.submit(request(f"{number}", "b", prompt(length), 3, max_tokens=50))
        sampler.step()
        sampler.cancel("0")
        sampler.cancel("1")
        try:
            sampler.submit(request("bad", "unknown", prompt(4)))
        except UserError as error:
            errors.append(error)

    computed = trained(trainer, disturb)
    assert errors
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(computed, expected, strict=True))
    assert_nothing_left(sampler)


@pytest.mark.parametrize(("name", "interrupted"), [("llama", True), ("qwen3_5", True), ("lfm2", False)])
def test_activations_are_not_recomputed_for_the_sake_of_a_sampler(name: str, interrupted: bool) -> None:
    """The pass takes most of the memory. A sampler with a cache needs little; one without computes whole sequences."""
    trainer, _ = new(name)
    trainer._budget = Budget(29, 29)
    recomputed: list[bool] = []
    run = trainer.engine.forward_backward

    def watched(parts: object, *, recompute: bool, give_way: object = None) -> object:
        recomputed.append(recompute)
        return run(parts, recompute=recompute, give_way=give_way)

    trainer.engine.forward_backward = watched
    points: list[int] = []
    in_one_call(trainer, [TrainItem("a", [datum(20, 9)])], lambda: points.append(1))
    assert bool(points) is interrupted
    assert not any(recomputed)
