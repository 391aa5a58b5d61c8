"""What a sampler refuses, and when requests wait."""

import math
from dataclasses import replace

import numpy as np
import pytest

import twinkle.sampler
from tests.support.models.sampling import (
    SPECS,
    assert_same_samples,
    blocks,
    drain,
    prompt,
    request,
    run,
    toy_sampler,
    toy_tokenizer,
    toy_trainer,
)
from twinkle.errors import CapacityError, InvalidInputError
from twinkle.sampler import Sampler, SampleRequest, SamplingParams, TorchSampler
from twinkle.sampler.torch_sampler import sampler as sampler_module
from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.model_pass import PendingPass
from twinkle.sampler.types import SamplerNumbers
from twinkle.sampler.validation import Limits, check_request


@pytest.fixture(scope="module")
def sampler() -> TorchSampler:
    return toy_sampler(toy_trainer())


def test_the_public_names() -> None:
    assert twinkle.sampler.__all__ == sorted(twinkle.sampler.__all__)
    assert all(hasattr(twinkle.sampler, name) for name in twinkle.sampler.__all__)
    with pytest.raises(AttributeError):
        twinkle.sampler.nothing  # noqa: B018


def test_it_is_a_sampler(sampler: TorchSampler) -> None:
    taken: Sampler = sampler
    assert taken.version_ids() == list(SPECS)
    assert not taken.busy
    assert taken.step() == []
    assert "tokens" in sampler.memory


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": 10**400}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_p", {"top_p": math.nan}),
        ("top_k", {"top_k": -2}),
        ("top_k", {"top_k": 1.5}),
        ("top_k", {"top_k": 10**400}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 124}),
        ("max_tokens", {"max_tokens": True}),
        ("seed", {"seed": 2**64}),
        ("seed", {"seed": -(2**63) - 1}),
        ("seed", {"seed": 0.5}),
        ("stop_tokens", {"stop_tokens": (97,)}),
        ("stop_tokens", {"stop_tokens": (-1,)}),
        ("stop_tokens", {"stop_tokens": 5}),
        ("stop_tokens", {"stop_tokens": ("x",)}),
        ("stop_strings", {"stop_strings": ("",)}),
        ("stop_strings", {"stop_strings": "text"}),
        ("stop_strings", {"stop_strings": (3,)}),
        ("stop_strings", {"stop_strings": ("\ud800",)}),
    ],
)
def test_bad_parameters_are_named(sampler: TorchSampler, field: str, params: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{field}: got .*, allowed: "):
        sampler.submit(request("x", "a", prompt(5), **params))
    assert not sampler.busy


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"prompt": np.array([], np.int64)}),
        ("prompt", {"prompt": np.array([[1, 2]])}),
        ("prompt", {"prompt": np.array([1.0, 2.0])}),
        ("prompt", {"prompt": np.array([1, 97])}),
        ("prompt", {"prompt": np.array([-1])}),
        ("prompt", {"prompt": [[1], [2, 3]]}),
        ("prompt", {"prompt": prompt(128)}),
        ("num_samples", {"num_samples": 0}),
        ("num_samples", {"num_samples": 1025}),
        ("num_samples", {"num_samples": 1.0}),
        ("topk_prompt_logprobs", {"topk_prompt_logprobs": -1}),
        ("topk_prompt_logprobs", {"topk_prompt_logprobs": 98}),
        ("topk_sample_logprobs", {"topk_sample_logprobs": -1}),
        ("topk_sample_logprobs", {"topk_sample_logprobs": 98}),
        ("topk_sample_logprobs", {"topk_sample_logprobs": True}),
        ("prompt_alt_tokens", {"prompt_alt_tokens": -1}),
        ("prompt_alt_tokens", {"prompt_alt_tokens": 1025}),
        ("prompt_logprobs_last_n", {"prompt_logprobs_last_n": -1}),
        ("prompt_logprobs_last_n", {"prompt_logprobs_last_n": 1.0}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("stream", {"stream": "yes"}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": np.zeros((5, 2), np.int64)}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": np.zeros(4, np.int64)}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": np.zeros((4, 2))}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": np.full((4, 2), -2)}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": np.full((4, 2), 97)}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": np.zeros((4, 1025), np.int64)}),
        ("target_prompt_logprobs", {"target_prompt_logprobs": [[1], [1, 2], [1], [1]]}),
        ("version_id", {"version_id": "unknown"}),
        ("request_id", {"request_id": 7}),
        ("scope", {"scope": "\udfff"}),
    ],
)
def test_bad_requests_are_named(sampler: TorchSampler, field: str, changes: dict[str, object]) -> None:
    values = {"request_id": "x", "version_id": "a", "prompt": prompt(5), "params": SamplingParams()} | changes
    with pytest.raises(InvalidInputError, match=rf"^{field}: got .*, allowed: "):
        sampler.submit(SampleRequest(**values))
    assert not sampler.busy


def test_results_do_not_grow_without_end() -> None:
    limits = Limits(200_000, 2**17, 2**17, True)
    long = np.zeros(2**16, np.int64)
    params = SamplingParams(max_tokens=2**14)
    for field, changes in (
        ("topk_prompt_logprobs", {"prompt": long, "topk_prompt_logprobs": 257}),
        ("prompt_alt_tokens", {"prompt": long, "prompt_alt_tokens": 257}),
        ("topk_sample_logprobs", {"num_samples": 16, "topk_sample_logprobs": 65}),
    ):
        asked = replace(SampleRequest("x", None, prompt(5), params), **changes)
        with pytest.raises(InvalidInputError, match=rf"^{field}: got .*, allowed: at most (256|64) at each of"):
            check_request(asked, limits)
        check_request(replace(asked, **{field: changes[field] - 1}), limits)


def test_an_id_is_used_by_one_request_at_a_time(sampler: TorchSampler) -> None:
    sampler.submit(request("x", "a", prompt(5), max_tokens=3))
    with pytest.raises(InvalidInputError, match="request_id: got 'x'"):
        sampler.submit(request("x", "b", prompt(5), max_tokens=3))
    drain(sampler)
    run(sampler, [request("x", "a", prompt(5), max_tokens=3)])


def test_the_prompt_is_the_samplers_own(sampler: TorchSampler) -> None:
    tokens = prompt(20)
    expected = run(sampler, [request("x", "a", tokens.copy(), max_tokens=10, seed=0)])["x"]
    sampler.submit(request("x", "a", tokens, max_tokens=10, seed=0))
    tokens[:] = 0
    assert_same_samples(drain(sampler)["x"], expected)


def test_without_a_tokenizer_there_are_no_stop_strings() -> None:
    sampler = TorchSampler(toy_trainer({}), None)
    run(sampler, [request("x", None, prompt(5), max_tokens=3, stop_tokens=(4,))])
    with pytest.raises(InvalidInputError, match="stop_strings: got 'x', allowed: none"):
        sampler.submit(request("x", None, prompt(5), stop_strings=("x",)))


# --- room -------------------------------------------------------------------------------------------------------------


def test_what_never_fits_the_cache_is_refused(sampler: TorchSampler) -> None:
    small = TorchSampler(toy_trainer({}), toy_tokenizer(), kv_budget_bytes=blocks(sampler, 3))
    room = 3 * BLOCK
    with pytest.raises(InvalidInputError, match=rf"prompt: got '{room} tokens', allowed: .*the cache holds {room}"):
        small.submit(request("x", None, prompt(room)))
    with pytest.raises(InvalidInputError, match=rf"max_tokens: got 9, allowed: .*\[1, 8\].*the cache holds {room}"):
        small.submit(request("x", None, prompt(room - 8), max_tokens=9))
    (sequence,) = run(small, [request("x", None, prompt(room - 8))])["x"].sequences
    assert len(sequence.tokens) == 8


def test_samples_that_fit_one_by_one(sampler: TorchSampler) -> None:
    """Each of these samples needs the whole cache."""
    small = TorchSampler(toy_trainer({}), toy_tokenizer(), kv_budget_bytes=blocks(sampler, 3))
    asked = [request(name, None, prompt(20, n), 3, max_tokens=28, seed=n) for n, name in enumerate("xyz")]
    expected = run(sampler, asked)
    for name, result in run(small, asked).items():
        assert_same_samples(result, expected[name])


def test_a_prompt_is_computed_once_for_all_its_samples(sampler: TorchSampler) -> None:
    rows = []
    run_pass = sampler._pass.start

    def counting(pieces: list) -> PendingPass:
        rows.append(sum(len(piece.tokens) for piece in pieces))
        return run_pass(pieces)

    sampler._pass.start = counting
    try:
        run(sampler, [request("x", "a", prompt(50, seed=50), 16, max_tokens=4)])
    finally:
        sampler._pass.start = run_pass
    assert rows == [50, 16, 16, 16]


def test_the_cache_comes_out_of_the_adapters_memory() -> None:
    trainer = toy_trainer({})
    before = trainer.memory.adapters
    sampler = TorchSampler(trainer, None, kv_budget_bytes=1_000_000)
    assert trainer.memory.adapters == before - 1_000_000
    assert 900_000 < sampler._cache.nbytes <= 1_000_000
    with pytest.raises(CapacityError):
        TorchSampler(trainer, None, kv_budget_bytes=before)
    with pytest.raises(CapacityError, match="kv_budget_bytes: got 100, allowed: at least"):
        TorchSampler(trainer, None, kv_budget_bytes=100)
    with pytest.raises(InvalidInputError, match="max_sequences"):
        TorchSampler(trainer, None, max_sequences=0)


def test_a_turn_ends_when_other_work_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn then draws one token. The samples are the same."""
    monkeypatch.setattr(sampler_module, "_TURN_SECONDS", 1e6)
    wanted = [
        request("a", "a", prompt(20), 2, max_tokens=6, seed=1),
        request("b", None, prompt(9), max_tokens=6, seed=2),
    ]
    sampler = toy_sampler(toy_trainer(SPECS))
    expected = run(sampler, wanted)
    sampler.end_turns_when(lambda: True)
    for each in wanted:
        sampler.submit(each)
    turns, outcomes = 0, {}
    while sampler.busy:
        outcomes |= {event.request_id: event.outcome for event in sampler.step()}
        turns += 1
    assert turns >= 6, "the prompts give the first token"
    for name, outcome in outcomes.items():
        assert_same_samples(outcome, expected[name])


def test_decode_steps_and_their_sequences_are_counted() -> None:
    sampler = toy_sampler(toy_trainer(SPECS))
    run(sampler, [request("a", "a", prompt(20), 3, max_tokens=6, seed=1, stop_at_eos=False)])
    assert sampler.numbers() == SamplerNumbers(decode_steps=5, decoded_tokens=15)
    run(sampler, [request("b", "a", prompt(20), 1, max_tokens=1, seed=1, stop_at_eos=False)])
    assert sampler.numbers() == SamplerNumbers(5, 15), "the prompt's own pass gives the first token"
