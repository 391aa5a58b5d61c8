"""Sampling with linear attention: states follow pieces, forks, preemption and prefixes of other requests."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.support.models.reference import assert_numbers_close
from tests.support.models.sampling import SPECS, blocks, drain, prompt, request, run, toy_sampler, toy_trainer
from tests.support.models.tiny_models import the_result, tiny_model
from twinkle.errors import CapacityError
from twinkle.model import Datum, Trainer, TrainItem
from twinkle.sampler import SampleFailure, SampleResult, TorchSampler
from twinkle.sampler.torch_sampler.states.pool import StatePool, StateShape, slots_for

NAMES = ("a", "c")
TOLERANCE = 1e-4  # the gates amplify rounding, more at some positions than at others: 5e-5 was seen


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return toy_trainer({name: SPECS[name] for name in NAMES}, tiny_model("qwen3_5"))


def in_pieces(trainer: Trainer, **options: int) -> TorchSampler:
    """Return a sampler that computes prompts in pieces of 32 tokens."""
    sampler = toy_sampler(trainer, **options)
    sampler._schedule._chunk_tokens = 32
    return sampler


def assert_as_trained(trainer: Trainer, name: str, tokens: np.ndarray, result: SampleResult) -> None:
    """Compare with the trainer, which computes each whole sequence at once."""
    for sequence in result.sequences:
        whole = np.concatenate([tokens, sequence.tokens])
        scored = the_result(trainer.forward([TrainItem(name, [Datum(whole[:-1], whole[1:])])])[0]).logprobs[0]
        assert_numbers_close(sequence.logprobs, scored[len(tokens) - 1 :], TOLERANCE)
        if result.prompt_logprobs is not None:
            assert_numbers_close(result.prompt_logprobs[1:], scored[: len(tokens) - 1], TOLERANCE)


def assert_slots_are_free(sampler: TorchSampler) -> None:
    states = sampler._cache.states
    assert len(states._free) + states.stored == states._slots
    assert states._held == 0


def test_pieces_and_samples_have_the_trainers_numbers(trainer: Trainer) -> None:
    """Prompts end inside a piece, at its end, inside the window of the convolution, and before a piece begins."""
    sampler = in_pieces(trainer)
    for tensor in (*sampler._cache.states.matrices, *sampler._cache.states.columns):
        tensor.fill_(torch.nan)  # what a slot held before must not matter
    asked = {f"{name}{length}": (name, prompt(length, length)) for name in NAMES for length in (1, 2, 33, 64, 70, 101)}
    requests = [
        dataclasses.replace(request(key, name, tokens, 3, max_tokens=9, seed=7), prompt_logprobs=len(tokens) > 2)
        for key, (name, tokens) in asked.items()
    ]
    results = run(sampler, requests)
    for key, (name, tokens) in asked.items():
        assert_as_trained(trainer, name, tokens, results[key])
        assert len({tuple(each.tokens) for each in results[key].sequences}) > 1
    assert_slots_are_free(sampler)


def test_preempted_sequences_go_on_with_the_same_numbers(trainer: Trainer) -> None:
    """The cache holds few blocks, and there are slots for two sequences and one prompt."""
    large = in_pieces(trainer)
    small = in_pieces(trainer, max_sequences=2, kv_budget_bytes=blocks(large, 6))
    preempted = []
    preempt = small._schedule._preempt
    small._schedule._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))
    asked = [request(f"{name}{n}", name, prompt(30 + 25 * n, n), 3, max_tokens=24) for name in NAMES for n in range(2)]
    results = run(small, asked)
    assert preempted
    for each in asked:
        assert_as_trained(trainer, each.version_id, each.prompt, results[each.request_id])
    assert_slots_are_free(small)


def test_requests_go_on_from_the_state_behind_a_prefix_that_was_computed(trainer: Trainer) -> None:
    sampler, shared = in_pieces(trainer), prompt(110, 5)
    first = run(sampler, [request("first", "a", shared, max_tokens=4)])["first"]
    assert first.cached_prompt_tokens == 0
    assert sampler._cache.states.stored > 0
    again = run(sampler, [request("again", "a", shared, max_tokens=4)])["again"]
    assert again.cached_prompt_tokens == 96  # the last full block before the last token
    longer = np.concatenate([shared[:90], prompt(25, 6)])
    other = run(sampler, [request("other", "a", longer, 2, max_tokens=4), request("base", None, shared, max_tokens=4)])
    assert other["other"].cached_prompt_tokens == 64  # of 80 equal tokens in full blocks; a piece ended behind 64
    assert other["base"].cached_prompt_tokens == 0
    assert_as_trained(trainer, "a", shared, again)
    assert_as_trained(trainer, "a", longer, other["other"])
    assert_as_trained(trainer, "a", shared, first)
    sampler.reset_prefix_cache()
    assert sampler._cache.states.stored == 0
    assert run(sampler, [request("new", "a", shared, max_tokens=1)])["new"].cached_prompt_tokens == 0
    sampler.retire("a")
    assert_slots_are_free(sampler)


def test_a_failed_pass_begins_its_sequences_anew(trainer: Trainer) -> None:
    """It may have changed the states of some layers, so it must not be repeated from where it began."""
    sampler, tokens = in_pieces(trainer), prompt(50, 1)
    start, failures = sampler._pass.start, []

    def failing(pieces: list) -> object:
        pending = start(pieces)
        if len(pieces) == 2 and pieces[0].start > 50:
            failures.append(len(pieces))
            raise torch.OutOfMemoryError
        return pending

    sampler._pass.start = failing
    results = run(sampler, [request(name, "a", tokens, max_tokens=8, seed=ord(name)) for name in "xy"])
    assert failures == [2]  # they do not share a pass again soon
    for result in results.values():
        assert_as_trained(trainer, "a", tokens, result)


def test_passes_get_smaller_until_they_fit(trainer: Trainer) -> None:
    """Sequences that begin anew go on from stored states, so the same pass would fail again and again."""
    sampler, sizes = in_pieces(trainer), []
    start = sampler._pass.start

    def limited(pieces: list) -> object:
        if len(pieces) > 2 and any(piece.start > 0 for piece in pieces):
            raise torch.OutOfMemoryError
        sizes.append(len(pieces))
        return start(pieces)

    sampler._pass.start = limited
    asked = [request(f"{n}", "a", prompt(100, n), 2, max_tokens=6, seed=n) for n in range(4)]
    for each in asked:
        sampler.submit(each)
    results: dict = {}
    for _ in range(200):
        results |= {event.request_id: event.outcome for event in sampler.step()}
    assert results.keys() == {each.request_id for each in asked}
    for each in asked:
        assert_as_trained(trainer, "a", each.prompt, results[each.request_id])
    assert 2 in sizes
    assert_slots_are_free(sampler)


def test_a_sequence_alone_begins_anew_once(trainer: Trainer) -> None:
    """What was freed after the first failure may be enough. A sequence that fails again at the same place fails."""
    sampler, tokens, failures = in_pieces(trainer), prompt(80, 1), []
    start = sampler._pass.start

    def failing(pieces: list, most: int) -> object:
        stop = pieces[0].start + len(pieces[0].tokens)
        if len(failures) < most and stop > 83:
            failures.append(stop)
            raise torch.OutOfMemoryError
        return start(pieces)

    sampler._pass.start = lambda pieces: failing(pieces, 1)
    assert_as_trained(trainer, "a", tokens, run(sampler, [request("x", "a", tokens, max_tokens=8)])["x"])
    assert failures == [84]
    sampler._pass.start = lambda pieces: failing(pieces, 10)
    sampler.submit(request("y", "a", tokens, max_tokens=8))
    outcome = drain(sampler)["y"]
    assert failures == [84, 84, 84]
    assert isinstance(outcome, SampleFailure)
    assert isinstance(outcome.error, CapacityError)
    assert_slots_are_free(sampler)


def test_stored_states_are_bounded_and_the_oldest_is_dropped_first() -> None:
    shape = StateShape(heads=2, key_width=4, value_width=4, features=6, columns=3)
    assert shape.size(torch.bfloat16) == 4 * 2 * 4 * 4 + 2 * 6 * 3
    assert slots_for(8, 100, 10_000) == 10
    assert slots_for(8, 100, 500) == 5
    pool = StatePool([shape], torch.float32, torch.device("cpu"), 10)
    assert pool.running == 8
    taken = [pool.take() for _ in range(8)]
    pool.store(1, b"x", taken[0])
    pool.store(1, b"y", taken[1])
    assert pool.find(1, b"x") is not None
    pool.store(2, b"z", taken[2])  # y was not used for longest
    assert (pool.find(1, b"y"), pool.stored) == (None, 2)
    kept = pool.hold(taken[3])
    assert kept is not None
    assert pool.hold(taken[4]) is None
    assert pool.stored == 1
    pool.drop(kept)
    pool.forget(2)
    assert pool.stored == 0
    with pytest.raises(CapacityError, match="slots: got 2, allowed: at least 3"):
        StatePool([shape], torch.float32, torch.device("cpu"), 2)
