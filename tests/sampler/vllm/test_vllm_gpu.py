"""vLLM beside a trainer on one GPU, in bf16, with CUDA graphs and asynchronous scheduling as a server runs it.

The tests run with the model runner that vLLM chooses; ``VLLM_USE_V2_MODEL_RUNNER=0`` chooses the older one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.sampler.vllm.vllm_model import make_adapter, prompt, request, run
from twinkle.model import LoraSpec, Trainer
from twinkle.sampler import SampleRequest, TorchSampler

if TYPE_CHECKING:
    from twinkle.sampler.vllm import VllmSampler

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = "random://llama-1b"
TOKENS = 24
# Tokens of a random model are about equally likely. Rounding moves the border of a token by some of its neighbours.
NEIGHBOURS = 1000
# The share must be free when vLLM starts; it is not the size of the cache.
CACHE = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**33}
DRAWS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    trainer = Trainer.from_pretrained(MODEL, device="cuda", dtype="bf16", memory_budget_bytes=20 * 2**30)
    for number in range(3):
        make_adapter(trainer, f"a{number}", LoraSpec(rank=16, seed=number), seed=number, size=0.01)
    return trainer


@pytest.fixture(scope="module")
def sampler(trainer: Trainer) -> "Iterator[VllmSampler]":
    from twinkle.sampler.vllm import VllmSampler

    options = {"max_model_len": 1024, "max_num_seqs": 64, "max_loras": 4, **CACHE}
    sampler = VllmSampler(trainer, None, engine_args=options)
    for number in range(3):
        sampler.publish(f"a{number}", f"a{number}")
    yield sampler
    sampler.close()


def requests() -> list[SampleRequest]:
    return [
        request(f"{number}-{kind}", version, prompt(20 + number, number), 2, max_tokens=TOKENS, seed=number, **draw)
        for number, version in enumerate([None, "a0", "a1", "a2"])
        for kind, draw in enumerate(DRAWS)
    ]


def test_random_weights_on_a_gpu(sampler: "VllmSampler") -> None:
    """The engine starts, which compares it with the trainer, and applies LoRA on all modules but perhaps the head."""
    assert sampler._unapplied <= {"lm_head"}


def test_the_reported_logprobs_are_the_trainers(sampler: "VllmSampler", trainer: Trainer) -> None:
    """Scores of the sampled tokens by the trainer's model differ by rounding in bf16 only."""
    scorer = TorchSampler(trainer, None, max_sequences=16)
    for number in range(3):
        scorer.publish(f"a{number}", f"a{number}")
    wanted = [each for each in requests() if each.params.temperature in (0.0, 1.0)]  # scores are at temperature 1
    drawn = {name: result.sequences[0] for name, result in run(sampler, wanted).items()}
    scored = []
    for each in wanted:
        tokens = np.concatenate([each.prompt, drawn[each.request_id].tokens])
        plain = request(each.request_id, each.version_id, tokens, max_tokens=1)
        scored.append(replace(plain, prompt_logprobs=True))
    scores = {name: result.prompt_logprobs[-TOKENS:] for name, result in run(scorer, scored).items()}
    errors = [np.abs(drawn[name].logprobs - scores[name]).mean() for name in drawn]
    assert max(errors) < 0.1


def test_a_seed_gives_the_same_tokens_again(sampler: "VllmSampler") -> None:
    """The request is alone both times, and none of its prompt is cached: otherwise bf16 may round differently.

    With an adapter it may even so, because vLLM's kernels for LoRA add up parts of a sum in no fixed order. Then only
    the number that decides about a token is known to be equal, and with it the first token, or one of its neighbours.
    """
    for version in (None, "a0"):
        one = request("r", version, prompt(30, 5), max_tokens=32, seed=11)
        sampler.reset_prefix_cache()
        first = run(sampler, [one])["r"].sequences[0].tokens
        sampler.reset_prefix_cache()
        again = run(sampler, [one])["r"].sequences[0].tokens
        if version is None:
            np.testing.assert_array_equal(again, first)
        assert abs(int(again[0]) - int(first[0])) < NEIGHBOURS
        other = replace(one, params=replace(one.params, seed=12))
        assert run(sampler, [other])["r"].sequences[0].tokens.tolist() != first.tolist()


def test_more_requests_than_run_at_once(sampler: "VllmSampler") -> None:
    """All ways to draw in batches whose rows change at almost every step."""
    lengths = {each.request_id: 8 + 3 * number for number, each in enumerate(requests())}
    wanted = [
        replace(each, num_samples=5, topk_sample_logprobs=number % 3, params=replace(each.params, max_tokens=length))
        for number, (each, length) in enumerate(zip(requests(), lengths.values(), strict=True))
    ]
    found = run(sampler, wanted)
    for each in wanted:
        length = lengths[each.request_id]
        for sequence in found[each.request_id].sequences:
            assert len(sequence.tokens) == length
            assert (sequence.logprobs <= 0).all()
            if each.topk_sample_logprobs:
                assert sequence.topk_logprobs.token_ids.shape == (length, each.topk_sample_logprobs)
                likelier = sequence.topk_logprobs.logprobs[:, 0]
                assert (likelier >= sequence.logprobs).all()
