"""A small model that vLLM can run on a CPU (its heads are at least 32 wide), and adapters for it."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.support.models.reference import with_random_weights
from twinkle import hub
from twinkle.model import LoraSpec, Trainer
from twinkle.sampler import (
    Finished,
    Progress,
    SampledSequence,
    SampleFailure,
    Sampler,
    SampleRequest,
    SampleResult,
    SamplingParams,
)

VOCAB = 512
CONTEXT = 256
END = 257
# The largest difference of a log-probability in fp32: two programs add the same numbers in a different order, and on a
# GPU vLLM's LoRA kernels round to the precision of TF32.
BOUND = 2e-2 if torch.cuda.is_available() else 3e-5
# Adapters of different ranks, without and with LoRA on the head.
SPECS = {
    "a": LoraSpec(rank=8, seed=1),
    "b": LoraSpec(rank=4, seed=2, train_mlp=False, train_unembed=True),
    "c": LoraSpec(rank=16, seed=3, train_unembed=True),
}
# On a GPU, vLLM checks that this share of the memory is free, and a trainer beside it counts on the rest. It is not the
# size of the cache, which is set below.
_SHARE = {"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}
ENGINE_ARGS = {"kv_cache_memory_bytes": 2**26, "max_loras": 4, "max_num_seqs": 64, **_SHARE}


def write_model(directory: Path, *, tied: bool = True) -> Path:
    """Write the model with the tokenizer of the other small models: one token for each byte."""
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=END,
        pad_token_id=258,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(hub.resolve("random://llama-tiny").path).save_pretrained(directory)
    return directory


def make_adapter(trainer: Trainer, adapter_id: str, spec: LoraSpec, seed: int, size: float = 0.05) -> None:
    """Create an adapter with random weights, large enough to change the samples."""
    trainer.create_adapter(adapter_id, spec)
    trainer.restore(adapter_id, with_random_weights(trainer, adapter_id, seed=seed, size=size))


def peft_reference(model: Path, adapter: Path | None) -> PreTrainedModel:
    """Return the plain transformers model, with the adapter in PEFT."""
    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return plain if adapter is None else PeftModel.from_pretrained(plain, adapter).eval()


def logprobs(model: PreTrainedModel, tokens: NDArray[np.int64], temperature: float = 1.0) -> NDArray[np.float32]:
    """Return (T, V): row t is the distribution of the token after ``tokens[: t + 1]``."""
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(tokens)[None]).logits[0].float()
    return (logits / temperature).log_softmax(-1).numpy()


def prompt(length: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 256, length)


def request(
    name: str, version: str | None, tokens: NDArray[np.int64], num_samples: int = 1, **params: object
) -> SampleRequest:
    """Return a request that does not stop at the end token, unless ``params`` says so."""
    return SampleRequest(name, version, tokens, SamplingParams(**{"stop_at_eos": False} | params), num_samples)


def events(sampler: Sampler, seconds: float = 120.0) -> list[Finished | Progress]:
    """Return all events until the sampler is idle."""
    found: list[Finished | Progress] = []
    end = time.monotonic() + seconds
    while sampler.busy:
        assert time.monotonic() < end, "nothing may wait for ever"
        found += sampler.step()
    return found


def run(sampler: Sampler, requests: Sequence[SampleRequest]) -> dict[str, SampleResult]:
    for each in requests:
        sampler.submit(each)
    outcomes = {event.request_id: event.outcome for event in events(sampler) if isinstance(event, Finished)}
    assert outcomes.keys() == {each.request_id for each in requests}
    assert not [outcome for outcome in outcomes.values() if isinstance(outcome, SampleFailure)], outcomes
    return outcomes


def assert_same_tokens(pairs: Sequence[tuple[SampledSequence, SampledSequence]]) -> None:
    """Compare sequences that were drawn with the same seeds.

    A difference within :data:`BOUND` may move a draw across the border between two tokens, and then the rest of that
    sequence differs. That hardly ever happens in fp32, and to few sequences with TF32.
    """
    different = [(left.tokens, right.tokens) for left, right in pairs if left.tokens.tolist() != right.tokens.tolist()]
    allowed = len(pairs) // 10 if torch.cuda.is_available() else 0
    assert len(different) <= allowed, different
    for left, right in pairs:
        if left.tokens.tolist() == right.tokens.tolist():
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=BOUND)
