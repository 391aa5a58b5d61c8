"""Helpers for tests of the sampler: a toy tokenizer, trained versions, and ways to run a sampler."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.models.reference import (
    ExactLogprobs,
    Reference,
    assert_numbers_close,
    assert_within,
    toy_llama,
    with_random_weights,
)
from tests.support.models.tiny_models import VOCAB, tiny_trainer
from twinkle.model import LoraSpec, Trainer
from twinkle.sampler import (
    Finished,
    SampledSequence,
    SampleFailure,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TopLogprobs,
    TorchSampler,
)

SPECS = {
    "a": LoraSpec(rank=4, seed=1),
    "b": LoraSpec(rank=12, seed=2, train_mlp=False, train_unembed=True),
    "c": LoraSpec(rank=3, seed=3),
}


END = 2  # the tokenizer's end token
BYTES = ["<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>"]  # the bytes of é and €


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with three special tokens, five bytes, and then one character a token."""
    special = ["<pad>", "<bos>", "<eos>"]
    characters = [chr(code) for code in range(0x20, 0x20 + VOCAB - 8)]
    vocab = {text: number for number, text in enumerate([*special, *BYTES, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def toy_trainer(specs: dict[str, LoraSpec] | None = None, model: PreTrainedModel | None = None) -> Trainer:
    """Return a trainer with one adapter for each spec. The random weights are large enough to change the samples."""
    trainer = tiny_trainer(toy_llama() if model is None else model)
    for number, (name, spec) in enumerate((SPECS if specs is None else specs).items()):
        trainer.create_adapter(name, spec)
        trainer.restore(name, with_random_weights(trainer, name, seed=number, size=0.05))
    return trainer


def toy_sampler(trainer: Trainer, **options: int) -> TorchSampler:
    """Return a sampler on which every adapter is published under its own name."""
    sampler = TorchSampler(trainer, toy_tokenizer(), **options)
    for adapter_id in trainer.adapter_ids():
        sampler.publish(adapter_id, adapter_id)
    return sampler


def blocks(sampler: TorchSampler, count: int) -> int:
    """Return the size in bytes of a cache with this many usable blocks."""
    per_block = sampler._cache._buffer.nbytes // (sampler._cache.capacity + 1)
    return per_block * (count + 1)


def reference(model: PreTrainedModel, trainer: Trainer, adapter_id: str) -> PreTrainedModel:
    """Return the plain model with the adapter in PEFT."""
    return Reference(model, trainer.spec(adapter_id), trainer.weights(adapter_id)).model.eval()


def prompt(length: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, VOCAB, length)


def request(
    name: str, version: str | None, tokens: NDArray[np.int64], num_samples: int = 1, **params: object
) -> SampleRequest:
    """Return a request that does not stop at the end token, unless ``params`` says so."""
    return SampleRequest(name, version, tokens, SamplingParams(**{"stop_at_eos": False} | params), num_samples)


def drain(sampler: TorchSampler) -> dict[str, SampleResult | SampleFailure]:
    """Run the sampler until it is idle, and return the outcome of each request. Streamed parts are ignored."""
    outcomes = {}
    for _ in range(10_000):
        for event in sampler.step():
            assert event.request_id not in outcomes
            if isinstance(event, Finished):
                outcomes[event.request_id] = event.outcome
        if not sampler.busy:
            break
    assert not sampler.busy
    assert_nothing_left(sampler)
    return outcomes


def run(sampler: TorchSampler, requests: Sequence[SampleRequest]) -> dict[str, SampleResult]:
    for each in requests:
        sampler.submit(each)
    outcomes = drain(sampler)
    assert outcomes.keys() == {each.request_id for each in requests}
    for outcome in outcomes.values():
        assert isinstance(outcome, SampleResult), outcome
    return outcomes


def next_logprobs(model: torch.nn.Module, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the log-probabilities (T, V) of the next token, computed by the plain model."""
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens)[None]).logits[0].float().log_softmax(-1).numpy()


def sample(sampler: TorchSampler, one: SampleRequest) -> list[SampledSequence]:
    return run(sampler, [one])[one.request_id].sequences


def assert_nothing_left(sampler: TorchSampler) -> None:
    assert not sampler._schedule._waiting
    assert not sampler._schedule._running
    if sampler._cache is not None:
        cache = sampler._cache
        assert cache.free == cache.capacity
        assert sum(cache._owners) == len(cache._owners) - 1 - cache.capacity  # blocks set aside


def assert_same_samples(ours: SampleResult, theirs: SampleResult) -> None:
    assert len(ours.sequences) == len(theirs.sequences)
    for left, right in zip(ours.sequences, theirs.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        assert_numbers_close(left.logprobs, right.logprobs)
        assert left.stop_reason == right.stop_reason


def assert_likeliest(top: TopLogprobs, exact: ExactLogprobs) -> None:
    """Check the likeliest tokens of all positions, from the first position on.

    If rounding can exchange two tokens, either may come first: a token must be as likely as the expected token at its
    place, up to the bounds of both.
    """
    ids_TK = top.token_ids
    assert all(len(set(ids)) == len(ids) for ids in ids_TK.tolist())
    wanted_TK = np.argsort(-exact.values_TV, axis=1, kind="stable")[:, : ids_TK.shape[1]]
    values, bounds = exact.at(ids_TK)
    wanted, wanted_bounds = exact.at(wanted_TK)
    assert (np.abs(values - wanted) <= bounds + wanted_bounds).all()
    assert_within(top.logprobs, values, bounds)
