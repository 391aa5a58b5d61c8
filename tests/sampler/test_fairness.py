"""Which requests run if not all can, and what the passes consist of."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.support.models.sampling import (
    SPECS,
    assert_nothing_left,
    assert_same_samples,
    blocks,
    prompt,
    request,
    run,
    toy_sampler,
    toy_tokenizer,
    toy_trainer,
)
from tests.support.models.tiny_models import tiny_model
from twinkle.model import Trainer
from twinkle.sampler import Finished, SampleResult, TorchSampler
from twinkle.sampler.torch_sampler.model_pass import PendingPass, Piece


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return toy_trainer()


def watch(sampler: TorchSampler) -> list[list[Piece]]:
    """Record what goes through the model from now on, pass by pass."""
    passes, run_pass = [], sampler._pass.start

    def watching(pieces: list[Piece]) -> PendingPass:
        passes.append(list(pieces))
        return run_pass(pieces)

    sampler._pass.start = watching
    return passes


def finish(sampler: TorchSampler) -> dict[str, SampleResult]:
    """Run to the end; return the outcomes in the order in which they finished."""
    outcomes = {}
    while sampler.busy:
        outcomes |= {event.request_id: event.outcome for event in sampler.step() if isinstance(event, Finished)}
    return outcomes


def test_many_samples_of_one_request_leave_room_for_others(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken when the other requests arrive, and no sample is near its end."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    sampler = toy_sampler(trainer, max_sequences=8)
    large = request("large", "a", prompt(20), 24, max_tokens=60, seed=0)
    small = [request(f"{n}", version, prompt(12, n), max_tokens=10, seed=n) for n, version in enumerate((None, *SPECS))]
    expected = run(toy_sampler(trainer), [large, *small])
    sampler.submit(large)
    for _ in range(10):
        sampler.step()
    assert len(sampler._schedule._running) == 8
    for each in small:
        sampler.submit(each)
    sampler.step()
    running = [sequence.job.request.request_id for sequence in sampler._schedule._running]
    assert running == ["large"] * 4 + ["0", "1", "2", "3"]
    results = finish(sampler)
    assert list(results)[-1] == "large"
    for name, result in expected.items():
        assert_same_samples(results[name], result)


def test_places_are_shared_among_requests(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    sampler = toy_sampler(trainer, max_sequences=9)
    shares = []
    for name in "xyz":
        sampler.submit(request(name, "a", prompt(6), 20, max_tokens=100, seed=0))
        for _ in range(4):
            sampler.step()
        running = [sequence.job.request.request_id for sequence in sampler._schedule._running]
        shares.append([running.count(each) for each in "xyz"])
    assert shares == [[9, 0, 0], [5, 4, 0], [3, 3, 3]]
    for name in "xyz":
        sampler.cancel(name)
    assert_nothing_left(sampler)


def test_samples_come_first_come_first_served_within_a_share(trainer: Trainer) -> None:
    """A request with only one place keeps it, and waiting requests are admitted in order."""
    sampler = toy_sampler(trainer, max_sequences=2)
    for n in range(6):
        sampler.submit(request(f"{n}", "a", prompt(6), max_tokens=30, seed=n))
    assert list(finish(sampler)) == [f"{n}" for n in range(6)]


def test_places_are_shared_among_tenants(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant fills all places with requests of one sample each.

    A late request of another tenant gets a place at once.
    """
    # one token per turn, on any machine
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    sampler = toy_sampler(trainer, max_sequences=8)
    crowd = [replace(request(f"{n}", "a", prompt(6, n), max_tokens=80, seed=n), scope="crowd") for n in range(40)]
    late = replace(request("late", "b", prompt(12), 2, max_tokens=10, seed=0), scope="quiet")
    expected = run(toy_sampler(trainer), [*crowd, late])
    for each in crowd:
        sampler.submit(each)
    for _ in range(10):
        sampler.step()
    assert len(sampler._schedule._running) == 8
    sampler.submit(late)
    outcomes: dict[str, SampleResult] = {}
    for _ in range(15):  # ten tokens, and a few steps for the prompt and for getting places
        outcomes |= {event.request_id: event.outcome for event in sampler.step() if isinstance(event, Finished)}
    assert list(outcomes) == ["late"]
    outcomes |= finish(sampler)
    for name, result in expected.items():
        assert_same_samples(outcomes[name], result)
    assert_nothing_left(sampler)


def test_prompts_are_shared_among_tenants(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's long prompts wait in line; the prompt of another tenant does not wait behind them."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    sampler = toy_sampler(trainer, max_sequences=16)
    sampler._schedule._chunk_tokens = 16  # several passes per prompt
    for n in range(12):
        sampler.submit(replace(request(f"{n}", None, prompt(100, n), max_tokens=4, seed=n), scope="crowd"))
    sampler.step()
    sampler.submit(replace(request("late", None, prompt(16, 77), max_tokens=4, seed=0), scope="quiet"))
    outcomes: list[str] = []
    for _ in range(8):
        outcomes += [event.request_id for event in sampler.step() if isinstance(event, Finished)]
    assert outcomes[:1] == ["late"]
    assert len(finish(sampler)) + len(outcomes) == 13
    assert_nothing_left(sampler)


def test_a_small_cache_is_shared_too(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose samples fill the cache does not repeatedly preempt a later one."""
    # one token per turn, on any machine
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    sampler = TorchSampler(trainer, toy_tokenizer(), kv_budget_bytes=blocks(toy_sampler(trainer), 8), max_sequences=8)
    sampler.publish("a", "a")
    large = request("large", "a", prompt(4), 16, max_tokens=60, seed=0)
    small = request("small", "a", prompt(4, 1), max_tokens=60, seed=1)
    expected = run(toy_sampler(trainer), [large, small])
    sampler.submit(large)
    while len(sampler._schedule._running) < 5:
        sampler.step()
    sampler.submit(small)
    results = finish(sampler)
    assert list(results) == ["small", "large"]
    for name, result in expected.items():
        assert_same_samples(results[name], result)


def test_the_oldest_prompt_waits_for_a_pass_that_is_full_of_others(trainer: Trainer) -> None:
    """The second scope's piece is planned first and takes the last blocks that the oldest prompt needs."""
    sampler = toy_sampler(trainer, kv_budget_bytes=blocks(toy_sampler(trainer), 6))
    old = replace(request("old", "a", prompt(94), max_tokens=2, seed=0), scope="first")
    new = replace(request("new", "b", prompt(30, 1), max_tokens=2, seed=1), scope="second")
    expected = run(toy_sampler(trainer), [old, new])
    for name, result in run(sampler, [old, new]).items():
        assert_same_samples(result, expected[name])


def test_without_a_cache_everyone_gets_a_turn() -> None:
    trainer = toy_trainer({}, tiny_model("lfm2"))
    sampler = toy_sampler(trainer)
    sampler._schedule._chunk_tokens = 40  # only a few sequences per pass
    sampler.submit(request("large", None, prompt(20), 12, max_tokens=20, seed=0))
    sampler.submit(request("small", None, prompt(5), max_tokens=20, seed=0))
    assert list(finish(sampler)) == ["small", "large"]


def test_passes_of_single_tokens_are_pure(trainer: Trainer) -> None:
    """A pass has pieces of one row and one draw, or pieces of prompts, never both, even while both are waiting."""
    sampler = toy_sampler(trainer)
    passes = watch(sampler)
    asked = [request(f"{n}", "abc"[n % 3], prompt(30 + 7 * n, n), 1 + n % 3, max_tokens=40, seed=n) for n in range(8)]
    for each in asked:
        sampler.submit(replace(each, prompt_logprobs=True, topk_sample_logprobs=2))
    sampler.submit(request("one token", "a", prompt(1), 4, max_tokens=40, seed=0))
    kinds = []
    while sampler.busy:
        sampler.step()
    for pieces in passes:
        decodes = [len(each.tokens) == 1 and len(each.draws) == 1 and each.scoring is None for each in pieces]
        assert all(decodes) or not any(decodes)
        kinds.append(decodes[0])
        if not decodes[0]:
            assert len(pieces) == 1 or sum(len(each.tokens) for each in pieces) <= 64
    mixed = kinds[: len(kinds) - kinds[::-1].index(False)]  # up to the last prompt piece
    assert True in mixed
    assert all(left != right for left, right in pairwise(mixed[1:]))  # they take turns


def test_a_crowd_is_like_everyone_alone(trainer: Trainer) -> None:
    """64 requests of four versions, with all kinds of options, in one batch."""
    rng = np.random.default_rng(0)
    asked = []
    for n in range(64):
        one = request(f"{n}", (None, *SPECS)[n % 4], prompt(int(rng.integers(1, 60)), n % 5), 1 + n % 3, seed=n)
        temperature, top_p = (0.0, 0.7, 1.0, 1.4)[n // 4 % 4], (1.0, 0.9)[n % 2]
        params = replace(one.params, max_tokens=int(rng.integers(1, 25)), temperature=temperature, top_p=top_p)
        options = [
            {},
            {"prompt_logprobs": True},
            {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2},
            {"prompt_alt_tokens": 2, "prompt_logprobs_last_n": 4, "stream": True},
        ]
        asked.append(replace(one, params=params, **options[n // 16]))
    together = run(toy_sampler(trainer), asked)
    sampler = toy_sampler(trainer)
    for each in asked:
        alone = run(sampler, [each])[each.request_id]
        crowd = together[each.request_id]
        assert_same_samples(crowd, alone)
        if each.prompt_logprobs:
            np.testing.assert_allclose(crowd.prompt_logprobs, alone.prompt_logprobs, atol=1e-5, rtol=1e-5)
        if each.prompt_alt_tokens:
            np.testing.assert_array_equal(crowd.prompt_alt_tokens.tokens, alone.prompt_alt_tokens.tokens)
        if each.topk_prompt_logprobs:
            left, right = crowd.topk_prompt_logprobs, alone.topk_prompt_logprobs
            np.testing.assert_array_equal(left.token_ids, right.token_ids)
