"""How a group of ranks judges its answers: how long a call may take, and which results count as the same."""

import math

import numpy as np
import pytest

from twinkle.errors import CapacityError, InvalidInputError
from twinkle.model.types import Datum, LoraSpec, TokenValues, TrainFailure, TrainItem, TrainResult
from twinkle.server.runtime.ray.actors.answers import fingerprint
from twinkle.server.runtime.ray.actors.step_clock import StepClock, Work


def test_a_call_may_take_ten_times_the_median_of_calls_like_it():
    clock, step = StepClock(10.0, 60.0), Work("optim_step")
    assert clock.allowed(step) == 600.0  # nothing is known about it
    for seconds in (400.0, 8.0):  # the first one compiled something
        clock.measure(step, seconds)
        assert clock.allowed(step) == 4000.0
    for seconds in (9.0, 10.0, 11.0):
        clock.measure(step, seconds)
    assert clock.allowed(step) == 100.0  # the slow first call has no effect any more
    assert clock.allowed(Work("snapshot of b")) == 600.0  # another kind of call
    for _ in range(64):
        clock.measure(step, 0.1)
    assert clock.allowed(step) == 60.0


def test_a_large_pass_may_take_longer_than_small_ones_took():
    clock = StepClock(10.0, 1.0)
    for _ in range(5):
        clock.measure(Work("forward", tokens=100, pairs=1000), 1.0)
    assert clock.allowed(Work("forward", tokens=50, pairs=100)) == 10.0
    assert clock.allowed(Work("forward", tokens=400, pairs=1000)) == 40.0
    assert clock.allowed(Work("forward", tokens=400, pairs=160_000)) == 1600.0  # one long sequence: attention counts
    for _ in range(5):
        clock.measure(Work("backward"), 1.0)  # without tokens
    assert clock.allowed(Work("backward", tokens=3, pairs=9)) == 90.0


def test_the_clock_forgets_calls_of_adapters_that_are_gone():
    clock = StepClock(10.0, 60.0)
    for _ in range(3):
        clock.measure(Work("snapshot of the first"), 100.0)
    for number in range(1100):
        clock.measure(Work(f"snapshot of {number}"), 1.0)
    assert len(clock._measured) == 1024
    assert clock.allowed(Work("snapshot of the first")) == 600.0


def result(*logprobs: float, loss: float = 1.0) -> TrainResult:
    array = np.array(logprobs, np.float32)
    return TrainResult([array], {"loss:sum": loss}, (TokenValues(array, array, array),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([result(-1.0, -2.0)], [result(-1.0, -2.00001)]),
        ([result(-1.0, -2.0)], [result(-2.0, -1.0)]),
        ([result(-1.0)], [result(math.nan)]),
        ([result(-1.0)], [result(-1.0, -1.0)]),
        ([result(-1.0)], [result(-1.0, loss=1.0001)]),
        ([result(-1.0)], [TrainFailure(InvalidInputError("a", 1, "2"))]),
        ([TrainFailure(InvalidInputError("a", 1, "2"))], [TrainFailure(CapacityError("a"))]),
        ({"grad_norm:last": 1.0}, {"grad_norm:last": math.nan}),
        ({"grad_norm:last": 1.0}, {"no_gradient:max": 1.0}),
        (LoraSpec(8, seed=1), LoraSpec(8, seed=2)),
        (1, True),
        (None, "None"),
    ],
)
def test_different_results_have_different_fingerprints(one, other):
    assert not fingerprint(one).equals(fingerprint(other))
    assert fingerprint(one).equals(fingerprint(one))


def test_the_order_of_metrics_and_the_last_bits_of_floats_do_not_count():
    one = {"grad_norm:last": 1.0, "lr:last": math.nan}
    other = {"lr:last": math.nan, "grad_norm:last": 1.0 + 1e-9}
    assert fingerprint(one).equals(fingerprint(other))
    almost = np.nextafter(np.float32(-2.0), np.float32(0.0))
    assert fingerprint([result(-1.0, -2.0)]).equals(fingerprint([result(-1.0, almost)]))


def test_texts_of_errors_do_not_count():
    one, other = (TrainFailure(InvalidInputError("a", value, "2")) for value in (1, 3))
    assert fingerprint(one).equals(fingerprint(other))


def test_a_result_of_an_unknown_type_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="object, which has no fingerprint"):
        fingerprint([object()])


def test_the_work_of_a_pass_is_its_tokens_and_the_squares_of_its_lengths():
    from twinkle.model.trainer.shard_requests import RequestShards

    items = [TrainItem("a", [Datum([1, 2, 3], [2, 3, 4])]), TrainItem("b", [Datum([1], [2]), Datum([1, 2], [2, 3])])]
    assert RequestShards.by_tokens(items, 2).work() == (6, 14)
    assert RequestShards.by_tokens([TrainItem("a", [])], 2).work() == (0, 0)
