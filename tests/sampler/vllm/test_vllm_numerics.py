"""vLLM's samples and log-probabilities, compared with transformers with PEFT and with the torch sampler."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.sampler.vllm.vllm_model import (
    BOUND,
    ENGINE_ARGS,
    SPECS,
    assert_same_tokens,
    logprobs,
    peft_reference,
    prompt,
    request,
    run,
)
from twinkle.model import Trainer
from twinkle.sampler import Finished, Progress, Sampler, SampleRequest

pytestmark = pytest.mark.vllm

VERSIONS = [None, *SPECS]
DRAWS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 20},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.9},
    {"temperature": 1e-9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7},
]


def requests() -> list[SampleRequest]:
    """Return requests for all versions with all ways to draw, to be sampled together."""
    return [
        request(f"{version}-{number}", version, prompt(5 + number, number), 2, max_tokens=9, seed=number, **draw)
        for version in VERSIONS
        for number, draw in enumerate(DRAWS)
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_logprobs_are_of_the_tempered_distribution_over_the_whole_vocabulary(
    version: str | None, sampler: Sampler, trainer: Trainer, model_dir: Path, tmp_path: Path
) -> None:
    adapter = None if version is None else tmp_path / "adapter"
    if version is not None:
        trainer.save(version, adapter, optimizer=False)
    model = peft_reference(model_dir, adapter)
    wanted = [replace(each, topk_sample_logprobs=6) for each in requests()]
    outcomes = run(sampler, wanted)
    for each in wanted:
        if each.version_id != version:
            continue
        temperature = each.params.temperature or 1.0
        for sequence in outcomes[each.request_id].sequences:
            rows = logprobs(model, np.concatenate([each.prompt, sequence.tokens]), temperature)[
                len(each.prompt) - 1 : -1
            ]
            expected = rows[np.arange(len(rows)), sequence.tokens]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=BOUND)
            likeliest = np.sort(rows, axis=1)[:, ::-1][:, :6]
            if temperature > 1e-3:  # below that, all tokens except one are equally impossible
                np.testing.assert_allclose(sequence.topk_logprobs.logprobs, likeliest, atol=BOUND)
                named = np.take_along_axis(rows, sequence.topk_logprobs.token_ids, axis=1)
                np.testing.assert_allclose(named, likeliest, atol=BOUND)


def test_same_seed_same_tokens_as_the_torch_sampler(sampler: Sampler, torch_sampler: Sampler) -> None:
    ours, theirs = run(sampler, requests()), run(torch_sampler, requests())
    assert_same_tokens(
        [
            pair
            for name, expected in theirs.items()
            for pair in zip(ours[name].sequences, expected.sequences, strict=True)
        ]
    )


def test_samples_are_the_same_in_any_company(sampler: Sampler) -> None:
    wanted = requests()
    together = run(sampler, wanted)
    pairs = []
    for each in wanted[::5]:
        alone = run(sampler, [each])[each.request_id]
        pairs += zip(alone.sequences, together[each.request_id].sequences, strict=True)
    assert_same_tokens(pairs)
    first, second = together["a-0"].sequences
    assert first.tokens.tolist() != second.tokens.tolist()


def test_the_base_model_stays_itself_while_all_places_of_adapters_are_taken(
    sampler: Sampler, torch_sampler: Sampler
) -> None:
    names = [f"place-{number}" for number in range(ENGINE_ARGS["max_loras"])]
    for name in names:
        sampler.publish(name, "a")
    run(sampler, [request(name, name, prompt(6), max_tokens=3, seed=1) for name in names])
    wanted = [request(f"r{number}", None, prompt(6, number), max_tokens=9, seed=number) for number in range(4)]
    expected = run(torch_sampler, wanted)
    for beside in (None, "place-0"):
        found = run(sampler, [*wanted, request("beside", beside, prompt(8), max_tokens=9, seed=5)])
        assert_same_tokens([(found[name].sequences[0], outcome.sequences[0]) for name, outcome in expected.items()])
    for name in names:
        sampler.retire(name)


def test_all_that_can_be_asked_of_a_prompt(sampler: Sampler, torch_sampler: Sampler) -> None:
    """All options for several versions at once, together with samples."""
    tokens = prompt(24, 7)
    named = np.full((23, 3), -1)
    named[4:9, 1] = 33
    wanted = []
    for version in VERSIONS:
        plain = request(f"s-{version}", version, tokens, 2, max_tokens=6, seed=3, temperature=1.5)
        options = {"prompt_logprobs": True, "topk_prompt_logprobs": 4, "prompt_alt_tokens": 3}
        wanted += [replace(plain, **options, target_prompt_logprobs=named)]
        wanted += [replace(plain, request_id=f"l-{version}", prompt_logprobs=True, prompt_logprobs_last_n=5)]
    ours, theirs = run(sampler, wanted), run(torch_sampler, wanted)
    assert_same_tokens([(ours[name].sequences[1], expected.sequences[1]) for name, expected in theirs.items()])
    for name, expected in theirs.items():
        found = ours[name]
        np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, atol=BOUND)
        if name.startswith("s-"):
            np.testing.assert_array_equal(found.topk_prompt_logprobs.token_ids, expected.topk_prompt_logprobs.token_ids)
            np.testing.assert_allclose(found.target_prompt_logprobs, expected.target_prompt_logprobs, atol=BOUND)
            np.testing.assert_array_equal(found.prompt_alt_tokens.tokens, expected.prompt_alt_tokens.tokens)
        else:
            assert np.isnan(found.prompt_logprobs[:-5]).all()


def test_prompts_are_found_in_the_cache(sampler: Sampler) -> None:
    """A prompt of another version is not found: its keys and values differ."""
    tokens = prompt(200, 11)
    first = run(sampler, [request("r", "a", tokens, max_tokens=2)])["r"]
    again = run(sampler, [request("r", "a", tokens, max_tokens=2)])["r"]
    other = run(sampler, [request("r", "b", tokens, max_tokens=2)])["r"]
    assert first.cached_prompt_tokens == other.cached_prompt_tokens == 0
    assert again.cached_prompt_tokens >= 128


def test_scopes_share_nothing(sampler: Sampler) -> None:
    """The time of generating or scoring does not reveal what other tenants have asked."""
    asked = replace(request("r", None, prompt(200, 12), max_tokens=2), prompt_logprobs=True, prompt_logprobs_last_n=1)
    scored = []
    step = sampler._scorer.step

    def watching() -> list[Finished | Progress]:
        events = step()
        scored.extend(event.outcome.cached_prompt_tokens for event in events if isinstance(event, Finished))
        return events

    sampler._scorer.step = watching
    hits = [run(sampler, [replace(asked, scope=scope)])["r"].cached_prompt_tokens for scope in ("x", "y", "x")]
    sampler._scorer.step = step
    assert hits[0] == hits[1] == 0 < hits[2]
    assert scored[0] == scored[1] == 0 < scored[2]
