"""Tokens are handed over as they are drawn."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.models.reference import toy_llama
from tests.support.models.sampling import (
    SPECS,
    assert_nothing_left,
    drain,
    prompt,
    request,
    run,
    toy_sampler,
    toy_trainer,
)
from tests.support.models.tiny_models import tiny_model
from twinkle.sampler import Finished, Progress, SampleFailure, SampleRequest, SampleResult, TorchSampler


def streamed(*args: object, **params: object) -> SampleRequest:
    return replace(request(*args, **params), stream=True)


def turns(sampler: TorchSampler) -> list[list[Finished | Progress]]:
    result = []
    while sampler.busy:
        result.append(sampler.step())
    return result


def assert_adds_up(events: list[Finished | Progress], outcome: SampleResult) -> None:
    """Check that the parts of each sample add up to its tokens, and that the last part gives the reason for its end."""
    for index, sequence in enumerate(outcome.sequences):
        parts = [event for event in events if isinstance(event, Progress) and event.index == index]
        assert all(len(part.tokens) == len(part.logprobs) > 0 for part in parts)
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), sequence.tokens)
        np.testing.assert_array_equal(np.concatenate([part.logprobs for part in parts]), sequence.logprobs)
        assert [part.stop_reason for part in parts] == [None] * (len(parts) - 1) + [sequence.stop_reason]
        tops = [part.topk_logprobs for part in parts]
        if sequence.topk_logprobs is None:
            assert tops == [None] * len(parts)
        else:
            for name in ("token_ids", "logprobs"):
                joined = np.concatenate([getattr(top, name) for top in tops])
                np.testing.assert_array_equal(joined, getattr(sequence.topk_logprobs, name))


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
def test_the_parts_are_the_whole(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without streaming, the result is the same and complete."""
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)  # one pass per turn
    sampler = toy_sampler(toy_trainer({}, toy_llama() if model == "llama" else tiny_model(model)))
    plain = [
        replace(request("x", None, prompt(40), 3, max_tokens=25, seed=1), topk_sample_logprobs=2),
        request("y", None, prompt(9), 2, max_tokens=25, seed=2, stop_tokens=tuple(range(3, 13))),
        request("quiet", None, prompt(9), 2, max_tokens=25, seed=2),
    ]
    expected = run(sampler, plain)
    for each in plain:
        sampler.submit(replace(each, stream=each.request_id != "quiet"))
    events = [event for turn in turns(sampler) for event in turn]
    for name, result in expected.items():
        mine = [event for event in events if event.request_id == name]
        (finished,) = [event for event in mine if isinstance(event, Finished)]
        assert mine[-1] is finished
        for left, right in zip(finished.outcome.sequences, result.sequences, strict=True):
            np.testing.assert_array_equal(left.tokens, right.tokens)
        if name == "quiet":
            assert len(mine) == 1
        else:
            assert_adds_up(mine, finished.outcome)
            assert len(mine) > 10


def test_many_tokens_of_a_turn_come_together() -> None:
    sampler = toy_sampler(toy_trainer({}))
    sampler.submit(streamed("x", None, prompt(9), 2, max_tokens=100, seed=0))
    for turn in turns(sampler):
        indices = [event.index for event in turn if isinstance(event, Progress)]
        assert len(indices) == len(set(indices))


def test_a_sample_that_ends_before_the_others_says_so_at_once() -> None:
    sampler = toy_sampler(toy_trainer({}), max_sequences=1)
    sampler.submit(streamed("x", None, prompt(9), 3, max_tokens=30, seed=0))
    events = [event for turn in turns(sampler) for event in turn]
    ends = [event.index for event in events if isinstance(event, Progress) and event.stop_reason]
    assert ends == [0, 1, 2]
    assert_adds_up(events, events[-1].outcome)


def test_a_cancelled_request_says_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.sampler.torch_sampler.sampler._TURN_SECONDS", 0.0)
    sampler = toy_sampler(toy_trainer())
    sampler.submit(streamed("x", "a", prompt(9), 2, max_tokens=60, seed=0))
    sampler.submit(streamed("y", "b", prompt(9), max_tokens=60, seed=0))
    for _ in range(5):
        assert any(event.request_id == "x" for event in sampler.step())
    sampler.cancel("x")
    rest = [event for turn in turns(sampler) for event in turn]
    assert {event.request_id for event in rest} == {"y"}
    assert isinstance(rest[-1], Finished)
    assert_nothing_left(sampler)
    assert sampler.step() == []


def test_a_failure_is_the_last_word() -> None:
    trainer = toy_trainer({"a": SPECS["a"]})
    trainer.engine.head.spec.weight_VH[5] = float("nan")
    sampler = toy_sampler(trainer)
    sampler.submit(streamed("x", "a", prompt(9), 2, max_tokens=60, seed=0))
    (event,) = sampler.step()
    assert isinstance(event, Finished)
    assert isinstance(event.outcome, SampleFailure)
    assert drain(sampler) == {}
