"""How requests end: stops, limits, streams, cancellation, mistakes."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sampler.vllm.vllm_model import CONTEXT, END, VOCAB, events, prompt, request, run
from twinkle import hub
from twinkle.errors import InvalidInputError
from twinkle.sampler import Finished, Progress, Sampler

pytestmark = pytest.mark.vllm

PROMPT = prompt(6, 1)


def tokens_of(sampler: Sampler, **params: object) -> tuple[list[int], str]:
    (sequence,) = run(sampler, [request("r", "a", PROMPT, **{"seed": 5, "max_tokens": 40} | params)])["r"].sequences
    assert len(sequence.logprobs) == len(sequence.tokens)
    return sequence.tokens.tolist(), sequence.stop_reason


def test_stop_tokens(sampler: Sampler) -> None:
    full, reason = tokens_of(sampler)
    assert (len(full), reason) == (40, "length")
    stop = full[11]
    ended = full[: full.index(stop) + 1]
    assert tokens_of(sampler, stop_tokens=(stop,)) == (ended, "stop")
    assert tokens_of(sampler, stop_tokens=(stop,), max_tokens=len(ended)) == (ended, "stop")
    assert tokens_of(sampler, max_tokens=len(ended)) == (ended, "length")


def test_stop_strings(sampler: Sampler) -> None:
    tokenizer = hub.load_tokenizer("random://llama-tiny")
    full, _ = tokens_of(sampler)
    at, text = next((at, text) for at, one in enumerate(full) if (text := tokenizer.decode([one])).isascii() and text)
    ended, reason = tokens_of(sampler, stop_strings=("never said", text))
    assert (ended, reason) == (full[: at + 1], "stop")


def test_the_end_token(sampler: Sampler) -> None:
    """Many samples make the end token likely. It ends a sample and is part of it, unless the request says otherwise."""
    many = request("r", "a", PROMPT, 64, seed=1, max_tokens=200, temperature=3.0, stop_at_eos=True)
    ended = [sequence for sequence in run(sampler, [many])["r"].sequences if sequence.stop_reason == "stop"]
    assert ended
    for sequence in ended:
        assert sequence.tokens[-1] == END
        assert END not in sequence.tokens[:-1]
    on = replace(many, params=replace(many.params, stop_at_eos=False))
    sequences = run(sampler, [on])["r"].sequences
    assert {sequence.stop_reason for sequence in sequences} == {"length"}
    assert any(END in sequence.tokens[:-1] for sequence in sequences)


def test_what_is_left_of_the_context(sampler: Sampler) -> None:
    full, reason = tokens_of(sampler, max_tokens=None)
    assert (len(full), reason) == (CONTEXT - len(PROMPT), "length")


def test_streams(sampler: Sampler) -> None:
    wanted = replace(request("r", "b", PROMPT, 3, max_tokens=12, seed=2), stream=True, topk_sample_logprobs=2)
    sampler.submit(wanted)
    *parts, finished = events(sampler)
    assert isinstance(finished, Finished)
    for index, sequence in enumerate(finished.outcome.sequences):
        own = [part for part in parts if isinstance(part, Progress) and part.index == index]
        assert len(own) > 1
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in own]), sequence.tokens)
        np.testing.assert_array_equal(np.concatenate([part.logprobs for part in own]), sequence.logprobs)
        ids = np.concatenate([part.topk_logprobs.token_ids for part in own])
        np.testing.assert_array_equal(ids, sequence.topk_logprobs.token_ids)
        assert [part.stop_reason for part in own] == [None] * (len(own) - 1) + ["length"]


def test_cancelling(sampler: Sampler) -> None:
    """A cancelled request gives no more events, and the others continue."""
    kept = request("kept", "a", PROMPT, seed=5, max_tokens=40)
    sampler.submit(replace(request("gone", "a", PROMPT, 4, max_tokens=200), stream=True, prompt_logprobs=True))
    sampler.submit(kept)
    while not any(event.request_id == "gone" for event in sampler.step()):
        pass
    sampler.cancel("gone")
    sampler.cancel("never was")
    found = events(sampler)
    assert {event.request_id for event in found} == {"kept"}
    (sequence,) = found[-1].outcome.sequences
    assert sequence.tokens.tolist() == tokens_of(sampler)[0]


@pytest.mark.parametrize(
    ("changes", "params", "field"),
    [
        ({"version_id": "none"}, {}, "version_id"),
        ({"prompt": np.arange(CONTEXT)}, {}, "prompt"),
        ({"prompt": np.array([VOCAB])}, {}, "prompt"),
        ({}, {"max_tokens": CONTEXT}, "max_tokens"),
        ({}, {"temperature": -1.0}, "temperature"),
        ({"num_samples": 0}, {}, "num_samples"),
        ({"target_prompt_logprobs": np.zeros((2, 1), np.int64)}, {}, "target_prompt_logprobs"),
    ],
)
def test_mistakes(sampler: Sampler, changes: dict[str, object], params: dict[str, object], field: str) -> None:
    plain = request("r", "a", PROMPT)
    with pytest.raises(InvalidInputError) as error:
        sampler.submit(replace(plain, params=replace(plain.params, **params), **changes))
    assert error.value.field == field
    assert not sampler.busy


@pytest.mark.parametrize("stream", [False, True])
def test_the_whole_vocabulary_can_be_reported(sampler: Sampler, stream: bool) -> None:
    """Each token once, the drawn one with the log-probability of the sample."""
    wanted = replace(request("r", "a", PROMPT, max_tokens=20, seed=3), topk_sample_logprobs=VOCAB, stream=stream)
    sampler.submit(wanted)
    finished = events(sampler)[-1]
    assert isinstance(finished, Finished)
    (sequence,) = finished.outcome.sequences
    top = sequence.topk_logprobs
    np.testing.assert_array_equal(np.sort(top.token_ids, axis=1), np.tile(np.arange(VOCAB), (20, 1)))
    assert (np.diff(top.logprobs, axis=1) <= 0).all()
    places = np.argsort(top.token_ids, axis=1)[np.arange(20), sequence.tokens]
    np.testing.assert_array_equal(top.logprobs[np.arange(20), places], sequence.logprobs)


def test_an_id_under_way(sampler: Sampler) -> None:
    sampler.submit(request("twice", "a", PROMPT, max_tokens=5))
    with pytest.raises(InvalidInputError, match="request_id"):
        sampler.submit(request("twice", "a", PROMPT, max_tokens=5))
    assert len(events(sampler)) == 1
