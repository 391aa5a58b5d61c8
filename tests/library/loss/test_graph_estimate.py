"""The price of a loss graph is estimated from shapes: never less than the interpreter's meter counts later."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses.traced import decode_graph, request
from twinkle.errors import UserError
from twinkle.loss.graph.estimate import Sizes, estimated_work
from twinkle.loss.graph.interpreter import Limits, Meter, evaluate


class CountingMeter(Meter):
    """A meter without a limit on work."""

    def __init__(self) -> None:
        super().__init__(Limits(work=2**60))

    @property
    def work(self) -> int:
        return self._work


def sizes(length: int) -> Sizes:
    return ((length,), "float32"), ((length,), "float32")


def ppo(logprobs, other):
    ratio = torch.exp(logprobs - other)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * other, clipped * other).sum()
    return loss, {"custom/ratio:mean": ratio.mean()}


def masked(logprobs, other):
    mask = other > 0.5
    return (logprobs[mask] * other[mask]).sum() + torch.masked_select(logprobs, mask).sum(), {}


def made_anew(logprobs, other):
    grid = torch.ones(4096, dtype=torch.float64, device=logprobs.device)
    return (logprobs.sum() * (grid**1.5).sum()).to(torch.float32), {}


def placed(logprobs, other):
    return (logprobs.cpu().to("cpu") * other.to(logprobs.device)).sum(), {}


def sorted_and_multiplied(logprobs, other):
    values, _ = torch.sort(other)
    return torch.outer(logprobs, values).softmax(-1).sum() + torch.logaddexp(logprobs, other).mean(), {}


@pytest.mark.parametrize("function", [ppo, masked, made_anew, placed, sorted_and_multiplied])
@pytest.mark.parametrize("length", [1, 33, 500])
def test_never_less_than_what_is_counted(function: Callable[..., Any], length: int) -> None:
    graph = decode_graph(request(function, {"logprobs": 1, "other": 1}))
    rng = np.random.default_rng(0)
    inputs = {"logprobs": -rng.random(length), "other": rng.random(length)}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs["other"][0] = 0.9
    meter = CountingMeter()
    evaluate(graph, inputs, "data[0]", meter)
    estimate = estimated_work(graph, [sizes(length)] * 3, {}, Limits())
    assert 3 * meter.work <= estimate <= 3.2 * meter.work


def test_powers_are_dear_and_squares_are_not() -> None:
    def with_exponent(exponent: float) -> int:
        graph = decode_graph(request(lambda logprobs: ((logprobs**exponent).sum(), {}), {"logprobs": 1}))
        return estimated_work(graph, [(((2**20,), "float64"),)], {}, Limits())

    assert with_exponent(1.7) > 20 * with_exponent(2)


def test_a_graph_that_makes_large_tensors_is_priced_without_making_them() -> None:
    """The attack: twelve powers of four million numbers, for one token."""

    def attack(logprobs):
        grid = logprobs.new_ones(2**22, dtype=torch.float64) * logprobs.sum()
        for _ in range(12):
            grid = grid**1.0001
        return grid.sum(), {}

    graph = decode_graph(request(attack, {"logprobs": 1}))
    estimate = estimated_work(graph, [(((1,), "float32"),)], {}, Limits())
    assert estimate > 2**30, "more than a request may take"
    with pytest.raises(UserError, match="more work than one request may"):
        evaluate(graph, {"logprobs": np.zeros(1, np.float32)}, "data[0]", Meter(Limits()))


def test_many_sizes_are_few_probes() -> None:
    graph = decode_graph(request(ppo, {"logprobs": 1, "other": 1}))
    known: dict[Sizes, int] = {}
    sequences = [sizes(length) for length in range(1, 1000)]
    estimate = estimated_work(graph, sequences, known, Limits())
    assert len(known) <= 8
    one_by_one = sum(estimated_work(graph, [each], {}, Limits()) for each in sequences[::50]) * 50
    assert 0.9 * one_by_one <= estimate <= 1.5 * one_by_one


def test_what_cannot_be_followed_counts_as_its_largest_tensor() -> None:
    def odd(logprobs):
        return logprobs.reshape(7, 3).sum() + torch.exp(logprobs).sum(), {}

    graph = decode_graph(request(odd, {"logprobs": 1}))
    assert estimated_work(graph, [(((100,), "float32"),)], {}, Limits()) > 0


def test_the_clock_covers_the_way_back() -> None:
    graph = decode_graph(request(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1}))
    times = iter([0.0, 1.0, 99.0])  # at the start, before the sum, after the gradient
    meter = Meter(Limits(seconds=10), clock=lambda: next(times))
    with pytest.raises(UserError, match="took more than 10 s"):
        evaluate(graph, {"logprobs": np.zeros(3, np.float32)}, "data[0]", meter)
