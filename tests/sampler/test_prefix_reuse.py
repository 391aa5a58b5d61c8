"""Prompts whose beginning was computed before: the same results with less work."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.models.reference import assert_numbers_close
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
from tests.support.models.tiny_models import add_trained_adapter, tiny_model, tiny_trainer
from twinkle.model import Trainer
from twinkle.sampler import SampleRequest, SampleResult, TorchSampler
from twinkle.sampler.torch_sampler.cache import BLOCK


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return toy_trainer()


def ask(name: str, version: str | None, tokens: np.ndarray, **options: object) -> SampleRequest:
    return replace(request(name, version, tokens, max_tokens=20, seed=3), **options)


def small_sampler(trainer: Trainer, count: int, **options: int) -> TorchSampler:
    bytes_ = blocks(toy_sampler(trainer), count)
    sampler = TorchSampler(trainer, toy_tokenizer(), kv_budget_bytes=bytes_, **options)
    sampler.publish("a", "a")
    return sampler


def one(sampler: TorchSampler, asked: SampleRequest) -> SampleResult:
    return run(sampler, [asked])[asked.request_id]


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (16, 0), (17, 16), (40, 32), (48, 32), (49, 48), (80, 64)])
def test_full_blocks_before_the_last_token_are_found_again(trainer: Trainer, length: int, hits: int) -> None:
    sampler = toy_sampler(trainer)
    first, second = (one(sampler, ask("x", "a", prompt(length))) for _ in range(2))
    assert (first.cached_prompt_tokens, second.cached_prompt_tokens) == (0, hits)
    assert_same_samples(second, first)


def test_the_longest_known_beginning_is_shared(trainer: Trainer) -> None:
    tokens = prompt(70)
    changed = tokens.copy()
    changed[40] = 3 + (changed[40] - 2) % 90
    cases = {"same": (tokens, 64), "shorter": (tokens[:50], 48), "changed": (changed, 32), "other": (prompt(70, 1), 0)}
    fresh = {name: one(toy_sampler(trainer), ask(name, "a", each)) for name, (each, _) in cases.items()}
    sampler = toy_sampler(trainer)
    one(sampler, ask("x", "a", tokens))
    for name, (each, hits) in cases.items():
        result = one(sampler, ask(name, "a", each))
        assert result.cached_prompt_tokens == hits, name
        assert_same_samples(result, fresh[name])


def test_the_next_turn_of_a_conversation_finds_what_was_generated(trainer: Trainer) -> None:
    sampler = toy_sampler(trainer)
    tokens = prompt(30)
    answer = one(sampler, ask("x", "a", tokens)).sequences[0].tokens
    assert len(answer) == 20  # 49 of the 50 tokens were computed: three blocks
    longer = np.concatenate([tokens, answer, prompt(9, 5)])
    second = one(sampler, ask("y", "a", longer, num_samples=3))
    assert second.cached_prompt_tokens == 48
    assert_same_samples(second, one(toy_sampler(trainer), ask("y", "a", longer, num_samples=3)))


def test_versions_do_not_share(trainer: Trainer) -> None:
    sampler = toy_sampler(trainer)
    asked = [ask(str(version), version, prompt(50)) for version in (None, *SPECS)]
    for each in asked:
        assert one(sampler, each).cached_prompt_tokens == 0
    for each in asked:
        result = one(sampler, each)
        assert result.cached_prompt_tokens == 48
        assert_same_samples(result, one(toy_sampler(trainer), each))


def test_requests_side_by_side(trainer: Trainer) -> None:
    """A pass takes 64 prompt tokens, so requests after the first find the blocks that it computed."""
    sampler = toy_sampler(trainer)
    results = run(sampler, [ask(name, "a", prompt(60)) for name in "xyz"])
    assert [results[name].cached_prompt_tokens for name in "xyz"] == [0, 48, 48]
    for name in "yz":
        assert_same_samples(results[name], results["x"])


def test_a_retired_version_is_forgotten() -> None:
    sampler = toy_sampler(toy_trainer())
    asked = ask("x", "a", prompt(50))
    one(sampler, asked)
    one(sampler, ask("base", None, prompt(50)))
    kept = len(sampler._cache._prefixes)
    sampler.submit(replace(asked, request_id="late"))
    sampler.retire("a")
    assert drain(sampler)["late"].cached_prompt_tokens == 48  # it was admitted while the version existed
    assert 0 < len(sampler._cache._prefixes) < kept
    sampler.publish("a", "b")
    assert one(sampler, asked).cached_prompt_tokens == 0
    assert one(sampler, ask("base", None, prompt(50))).cached_prompt_tokens == 48


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scopes_share_nothing(trainer: Trainer) -> None:
    """Otherwise the count would tell one tenant what another one asked the base model."""
    sampler = toy_sampler(trainer)
    for scope, hits in (("one", 0), ("other", 0), ("one", 64), ("other", 64)):
        result = one(sampler, replace(ask("x", None, prompt(70)), scope=scope))
        assert result.cached_prompt_tokens == hits


def test_what_is_scored_is_computed(trainer: Trainer) -> None:
    tokens = prompt(70)
    targets = np.full((69, 1), -1)
    targets[60:] = 5
    cases = [
        ({"prompt_logprobs": True}, 0),
        ({"topk_prompt_logprobs": 2}, 0),
        ({"prompt_alt_tokens": 2}, 0),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, 64),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, 64),  # position 65 is predicted by token 64
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 6}, 48),
        ({"topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 21}, 48),
        ({"topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 22}, 32),
        ({"prompt_alt_tokens": 2, "prompt_logprobs_last_n": 22}, 0),  # computed for all positions
        ({"target_prompt_logprobs": targets}, 48),
    ]
    sampler = toy_sampler(trainer)
    one(sampler, ask("x", "a", tokens))
    for options, hits in cases:
        asked = ask("x", "a", tokens, **options)
        result, fresh = one(sampler, asked), one(toy_sampler(trainer), asked)
        assert result.cached_prompt_tokens == hits, options
        assert_same_samples(result, fresh)
        if result.prompt_logprobs is not None:
            np.testing.assert_array_equal(np.isnan(result.prompt_logprobs), np.isnan(fresh.prompt_logprobs))
            assert_numbers_close(np.nan_to_num(result.prompt_logprobs), np.nan_to_num(fresh.prompt_logprobs))
        if result.target_prompt_logprobs is not None:
            assert_numbers_close(result.target_prompt_logprobs, fresh.target_prompt_logprobs)
        if result.prompt_alt_tokens is not None:
            np.testing.assert_array_equal(result.prompt_alt_tokens.tokens, fresh.prompt_alt_tokens.tokens)


# --- room -------------------------------------------------------------------------------------------------------------


def test_what_was_used_least_recently_is_given_up_first(trainer: Trainer) -> None:
    sampler = small_sampler(trainer, 7)
    first, second, third = (ask(name, "a", prompt(33, n)) for n, name in enumerate("xyz"))
    for each in (first, second):
        one(sampler, each)
    assert one(sampler, first).cached_prompt_tokens == 32  # used again, so the second is now the oldest
    one(sampler, third)
    assert one(sampler, first).cached_prompt_tokens == 32
    assert one(sampler, second).cached_prompt_tokens < 32


def test_remembered_blocks_are_in_nobodys_way(trainer: Trainer) -> None:
    """Requests that need the whole cache run as if it were empty; no sequence is preempted for cached blocks."""
    sampler = small_sampler(trainer, 4)
    preempted = []
    preempt = sampler._schedule._preempt
    sampler._schedule._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))
    for n in range(5):
        asked = request("x", "a", prompt(40, n), max_tokens=24, seed=n)
        assert len(one(sampler, asked).sequences[0].tokens) == 4 * BLOCK - 40
    assert not preempted
    assert 0 < len(sampler._cache._prefixes) <= 4


def test_a_crowd_in_a_small_cache(trainer: Trainer) -> None:
    """Preempted sequences resume with what is left of their blocks and draw the same tokens."""
    common = prompt(35)
    asked = [
        request(f"{n}", "a", np.concatenate([common[: 5 * n], prompt(4 + n, n)]), 3, max_tokens=30, seed=n)
        for n in range(7)
    ]
    expected = run(toy_sampler(trainer), asked)
    sampler = small_sampler(trainer, 9)
    for _ in range(2):
        for name, result in run(sampler, asked).items():
            assert_same_samples(result, expected[name])
            assert 0 <= result.cached_prompt_tokens < len(asked[int(name)].prompt)


def test_the_same_schedule_gives_the_same_bits(trainer: Trainer) -> None:
    asked = [ask(f"{version}{n}", version, prompt(20 + 9 * n), num_samples=2) for version in SPECS for n in range(4)]

    def outcome() -> list[tuple[list[int], list[float], int]]:
        sampler = toy_sampler(trainer)
        results = [run(sampler, asked) for _ in range(2)]
        return [
            (sequence.tokens.tolist(), sequence.logprobs.tolist(), result.cached_prompt_tokens)
            for each in results
            for _, result in sorted(each.items())
            for sequence in result.sequences
        ]

    assert outcome() == outcome()


@pytest.mark.parametrize("family", ["phi3-longrope", "qwen2-sliding"])
def test_positions_that_are_encoded_in_two_ways(family: str) -> None:
    """longrope changes its encoding beyond 16 tokens, so a longer sequence cannot reuse blocks of a shorter one."""
    model = tiny_model(family)
    trainer = tiny_trainer(model)
    add_trained_adapter(trainer, "a", SPECS["a"], model)
    sampler = toy_sampler(trainer)
    tokens = prompt(60)
    one(sampler, request("x", "a", tokens[:16], max_tokens=1))  # fills a block with the short encoding
    hits = []
    for length in (17, 16, 33, 60, 40):
        asked = request("x", "a", tokens[:length], 2, max_tokens=12, seed=1)
        result = one(sampler, asked)
        hits.append(result.cached_prompt_tokens)
        assert_same_samples(result, one(toy_sampler(trainer), asked))
    assert hits == [0 if family == "phi3-longrope" else 16, 0, 16, 32, 32]


def test_a_copy_of_a_block_is_not_cleaned(trainer: Trainer) -> None:
    """Its last owner took the block and returned it before anything was written, for example because of an error."""
    cache = toy_sampler(trainer)._cache
    cache.clean()
    prefix = cache.take()
    cache.clean()
    cache.keys[0][prefix] = 1.0
    unwritten = cache.take()
    cache.release([unwritten])
    assert cache.take_copy(prefix) == unwritten
    cache.clean()
    assert (cache.keys[0][unwritten] == 1).all()
