"""gpt-oss has attention sinks, and windows on every second layer: all ways through the cache give the same numbers.

Prompts and samples are longer than the window.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.models.reference import assert_numbers_close, with_random_weights
from tests.support.models.sampling import blocks, prompt, request, run, toy_sampler, toy_tokenizer
from tests.support.models.tiny_models import WINDOW, the_result, tiny_model, tiny_trainer
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem
from twinkle.sampler import SampleRequest, SampleResult, TorchSampler
from twinkle.sampler.torch_sampler import sampler as sampler_module


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    trainer = tiny_trainer(tiny_model("gpt_oss"))
    for number, spec in enumerate((LoraSpec(4, seed=1), LoraSpec(12, seed=2, train_unembed=True))):
        trainer.create_adapter("ab"[number], spec)
        trainer.restore("ab"[number], with_random_weights(trainer, "ab"[number], seed=number, size=0.2))
    return trainer


def crowd() -> list[SampleRequest]:
    common = prompt(2 * WINDOW + 19)
    return [
        request(f"{version}{n}", version, np.concatenate([common[: 7 * n], prompt(4 + n, n)]), 3, max_tokens=24, seed=n)
        for version in "ab"
        for n in range(4)
    ]


def check(trainer: Trainer, asked: SampleRequest, result: SampleResult) -> None:
    """Compare the log-probabilities of what was sampled with the trainer's."""
    for sequence in result.sequences:
        whole = np.concatenate([asked.prompt, sequence.tokens])
        scored = the_result(trainer.forward([TrainItem(asked.version_id, [Datum(whole[:-1], whole[1:])])])[0])
        assert_numbers_close(sequence.logprobs, scored.logprobs[0][len(asked.prompt) - 1 :])


def test_samples_of_one_prompt(trainer: Trainer) -> None:
    results = run(toy_sampler(trainer), crowd())
    for asked in crowd():
        check(trainer, asked, results[asked.request_id])
        assert len({tuple(each.tokens) for each in results[asked.request_id].sequences}) == 3


def test_after_preemption(trainer: Trainer) -> None:
    small = TorchSampler(trainer, toy_tokenizer(), kv_budget_bytes=blocks(toy_sampler(trainer), 7))
    for version in "ab":
        small.publish(version, version)
    preempted, preempt = [], small._schedule._preempt
    small._schedule._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))
    results = run(small, crowd())
    assert preempted
    for asked in crowd():
        check(trainer, asked, results[asked.request_id])


def test_after_prefix_hits_and_in_pieces(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(70)
    asked = request("x", "a", tokens, 2, max_tokens=20, seed=3)
    monkeypatch.setitem(sampler_module._CHUNK_TOKENS, "cpu", 11)
    sampler, results = toy_sampler(trainer), []
    for _ in range(2):
        results.append(run(sampler, [asked])["x"])
        check(trainer, asked, results[-1])
    assert [each.cached_prompt_tokens for each in results] == [0, 64]
    longer = replace(asked, prompt=np.concatenate([tokens, results[0].sequences[0].tokens]))
    check(trainer, longer, run(sampler, [longer])["x"])


def test_prompts_are_scored_as_the_trainer_does(trainer: Trainer) -> None:
    tokens = prompt(40)
    asked = replace(request("x", "b", tokens, max_tokens=1), prompt_logprobs=True)
    scored = the_result(trainer.forward([TrainItem("b", [Datum(tokens[:-1], tokens[1:])])])[0])
    assert_numbers_close(run(toy_sampler(trainer), [asked])["x"].prompt_logprobs[1:], scored.logprobs[0])
