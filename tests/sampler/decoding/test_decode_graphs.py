"""Captured decoding on CUDA, compared with plain passes of the same model; and its kernels, compared with formulas."""

import math

import numpy as np
import pytest
import torch

from tests.support.models.reference import wide_llama
from tests.support.models.sampling import prompt, request, run, toy_tokenizer
from tests.support.models.tiny_models import tiny_model, tiny_trainer
from twinkle.model import LoraSpec, Trainer, adopt_model
from twinkle.model.decoder.joined import join_weights
from twinkle.sampler import SampleFailure, SampleRequest, TorchSampler
from twinkle.sampler.torch_sampler.decode_graphs import DecodeGraphs
from twinkle.sampler.torch_sampler.model_pass import ModelPass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

# Two bf16 computations of a log-probability in these models may differ by this much.
BOUND = 0.05
SPECS = {
    "a": LoraSpec(rank=8, seed=1),
    "b": LoraSpec(rank=24, seed=2, train_mlp=False, train_unembed=True),
    "c": LoraSpec(rank=128, seed=3),
    "too wide": LoraSpec(rank=200, seed=4),
}


def trained(family: str | None = None) -> Trainer:
    model = wide_llama(max_position_embeddings=4096) if family is None else tiny_model(family)
    return trained_on(tiny_trainer(model.to("cuda", torch.bfloat16)))


def trained_on(trainer: Trainer) -> Trainer:
    """Give a trainer adapters that are not zero."""
    generator = np.random.default_rng(0)
    for name, spec in SPECS.items():
        trainer.create_adapter(name, spec)
        snapshot = trainer.snapshot(name)
        noise = generator.normal(0, 0.02, snapshot.weights.shape).astype(np.float32)
        snapshot.weights[:] = np.where(snapshot.weights != 0, snapshot.weights, noise)
        trainer.restore(name, snapshot)
    return trainer


def own_layers(trainer: Trainer) -> TorchSampler:
    """Return a sampler whose graphs compute the model's own layers, not fused ones."""
    sampler = TorchSampler(trainer, toy_tokenizer(), max_sequences=40)
    assert sampler._graphs is not None
    assert sampler._cache is not None
    longest = trainer.architecture.max_length + 8
    sampler._graphs = DecodeGraphs(trainer.engine, sampler._cache, 40, longest, sampler._versions, fuse=False)
    sampler._pass = ModelPass(trainer.engine, sampler._cache, sampler._graphs)
    for name in trainer.adapter_ids():
        sampler.publish(name, name)
    return sampler


def samplers(trainer: Trainer) -> tuple[TorchSampler, TorchSampler]:
    """Return two samplers: one decodes with graphs, the other without."""
    graphs, plain = (TorchSampler(trainer, toy_tokenizer(), max_sequences=40) for _ in range(2))
    for sampler in (graphs, plain):
        for name in trainer.adapter_ids():
            sampler.publish(name, name)
    assert graphs._graphs is not None
    assert graphs._graphs.fused
    plain._graphs = None
    return graphs, plain


@pytest.fixture(scope="module")
def pair() -> tuple[TorchSampler, TorchSampler]:
    return samplers(trained())


def mixed(count: int, **params: object) -> list[SampleRequest]:
    """Return requests for versions of all ranks and the base model, with prompts of any length."""
    names = [*SPECS, None]
    return [
        request(f"r{number}", names[number % 5], prompt(1 + 37 * number % 300, number), **{"seed": number} | params)
        for number in range(count)
    ]


def assert_alike(ours: dict, theirs: dict) -> None:
    """Check that tokens and log-probabilities agree.

    Tokens may differ after the first one for which two likelihoods were too close for bf16.
    """
    differing = 0
    for name, result in ours.items():
        for left, right in zip(result.sequences, theirs[name].sequences, strict=True):
            unequal = np.flatnonzero(left.tokens != right.tokens)
            same = int(unequal[0]) if len(unequal) else len(left.tokens)
            differing += bool(len(unequal))
            np.testing.assert_allclose(left.logprobs[:same], right.logprobs[:same], atol=BOUND)
    assert differing <= 1 + 0.7 * len(ours)


@pytest.mark.parametrize("count", [1, 2, 5, 33, 40, 64])
def test_graphs_give_what_plain_passes_give(pair: tuple[TorchSampler, TorchSampler], count: int) -> None:
    graphs, plain = pair
    requests = mixed(count, max_tokens=13, temperature=0.0)
    assert_alike(run(graphs, requests), run(plain, requests))


@pytest.mark.parametrize("count", [1, 5, 40])
def test_graphs_of_the_models_own_layers_give_what_plain_passes_give(count: int) -> None:
    trainer = trained()
    _, plain = samplers(trainer)
    graphs = own_layers(trainer)
    assert not graphs._graphs.fused
    requests = mixed(count, max_tokens=13, temperature=0.0)
    assert_alike(run(graphs, requests), run(plain, requests))


@pytest.mark.parametrize("spare_rows", [False, True])
def test_joined_weights_give_what_separate_ones_give(spare_rows: bool) -> None:
    model = wide_llama(max_position_embeddings=4096).to("cuda", torch.bfloat16)
    separate = trained_on(tiny_trainer(model))
    join_weights(model, spare_rows=spare_rows)
    joined = trained_on(Trainer(adopt_model(model), model_id="joined"))
    graphs, plain = samplers(joined)[0], samplers(separate)[1]
    assert graphs._graphs is not None
    assert graphs._graphs._lora.has_spare_rows == spare_rows
    # Both versions fit into spare rows; with "c" they do not.
    for names in (["a", "b", None], ["b"], ["a", "b", "c"], ["a"]):
        requests = [
            request(f"r{n}", names[n % len(names)], prompt(3 + 5 * n, n), max_tokens=20, temperature=0.0)
            for n in range(9)
        ]
        assert_alike(run(graphs, requests), run(plain, requests))


def test_many_rows_in_one_pass() -> None:
    """512 sequences are one graph; draws that need much memory are made in parts."""
    trainer = trained()
    trainer.engine.head.chunk_rows = 512
    sampler = TorchSampler(trainer, toy_tokenizer())
    assert sampler._graphs is not None
    assert sampler._graphs.max_rows == 512
    for name in ("a", "b"):
        sampler.publish(name, name)
    how = [{}, {"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.8}]
    requests = [
        request(f"r{n}", ["a", "b", None][n % 3], prompt(4 + n % 40, n), max_tokens=9, seed=n, **how[n % 4])
        for n in range(512)
    ]
    few = [each for n, each in enumerate(requests) if n % 64 < 4]
    together, alone = run(sampler, requests), run(sampler, few)
    assert all(len(result.sequences[0].tokens) == 9 for result in together.values())
    assert_alike(alone, {name: together[name] for name in alone})


def test_log_probabilities_are_the_trainers(pair: tuple[TorchSampler, TorchSampler]) -> None:
    from twinkle.model import Datum, TrainItem

    graphs, _ = pair
    requests = mixed(10, max_tokens=40)
    for name, result in run(graphs, requests).items():
        asked = next(each for each in requests if each.request_id == name)
        if asked.version_id is None:
            continue
        whole = np.concatenate([asked.prompt, result.sequences[0].tokens])
        (scored,) = graphs._trainer.forward([TrainItem(asked.version_id, [Datum(whole[:-1], whole[1:])])])
        np.testing.assert_allclose(
            result.sequences[0].logprobs, scored.logprobs[0][len(asked.prompt) - 1 :], atol=2 * BOUND
        )


def test_the_same_schedule_gives_the_same_bits() -> None:
    trainer = trained()
    first, second = (run(samplers(trainer)[0], mixed(30, max_tokens=30)) for _ in range(2))
    for name, result in first.items():
        np.testing.assert_array_equal(result.sequences[0].tokens, second[name].sequences[0].tokens)
        np.testing.assert_array_equal(result.sequences[0].logprobs, second[name].sequences[0].logprobs)


def test_top_k_stops_and_odd_lengths(pair: tuple[TorchSampler, TorchSampler]) -> None:
    """Samples end in the middle of tokens drawn ahead, and rows draw in different ways."""
    graphs, _ = pair
    requests = [
        request(f"r{number}", "a", prompt(9, number), 2, max_tokens=1 + number, seed=number, **how)
        for number, how in enumerate([{"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}, {}] * 6)
    ]
    results = run(graphs, requests)
    for each in requests:
        assert [len(s.tokens) for s in results[each.request_id].sequences] == [each.params.max_tokens] * 2
    whole = run(graphs, [request("x", "b", prompt(5), max_tokens=50, seed=1)])["x"].sequences[0].tokens
    stop = int(whole[20])
    ended = run(graphs, [request("x", "b", prompt(5), max_tokens=50, seed=1, stop_tokens=(stop,))])["x"].sequences[0]
    np.testing.assert_array_equal(ended.tokens, whole[: list(whole).index(stop) + 1])
    assert ended.stop_reason == "stop"


def test_a_version_of_nan_fails_alone(pair: tuple[TorchSampler, TorchSampler]) -> None:
    trainer = trained()
    snapshot = trainer.snapshot("c")
    snapshot.weights[:] = np.nan
    trainer.restore("c", snapshot)
    graphs, _ = samplers(trainer)
    requests = mixed(20, max_tokens=20)
    expected = run(samplers(trained())[0], requests)
    for each in requests:
        graphs.submit(each)
    outcomes = {}
    while graphs.busy:
        outcomes |= {event.request_id: event.outcome for event in graphs.step()}
    for each in requests:
        if each.version_id == "c":
            assert isinstance(outcomes[each.request_id], SampleFailure)
        else:
            sequence = outcomes[each.request_id].sequences[0]
            same = expected[each.request_id].sequences[0]
            np.testing.assert_allclose(sequence.logprobs[:1], same.logprobs[:1], atol=BOUND)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2", "qwen3", "phi3", "mistral", "gpt_oss"])
def test_families(family: str) -> None:
    """Windows and capped logits are captured too. Families that cannot be captured still decode."""
    graphs, plain = (
        TorchSampler(tiny_trainer(tiny_model(family).to("cuda", torch.bfloat16)), toy_tokenizer()) for _ in range(2)
    )
    plain._graphs = None
    requests = [
        request(f"r{number}", None, prompt(3 + 5 * number, number), max_tokens=20, temperature=0.0)
        for number in range(6)
    ]
    assert_alike(run(graphs, requests), run(plain, requests))


@pytest.mark.parametrize("window", [None, 1, 17, 100])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 64), (4, 4, 40), (32, 1, 128)])
def test_attention_to_the_cache(
    window: int | None, softcap: float | None, heads: int, kv_heads: int, width: int
) -> None:
    from twinkle.sampler.torch_sampler.attention_kernels import attend_one_token

    torch.manual_seed(0)
    lengths = torch.tensor([1, 15, 16, 17, 64, 129, 300], device="cuda", dtype=torch.int32)
    blocks = torch.randperm(200, device="cuda")[: 7 * 20].int().view(7, 20)
    keys, values = (torch.randn(200, 16, kv_heads, width, device="cuda") for _ in range(2))
    query = torch.randn(7, heads, width, device="cuda")
    out = attend_one_token(query, keys, values, blocks, lengths, width**-0.5, window, softcap)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - window)
        k, v = (
            x[blocks[row].long()].flatten(0, 1)[first:length].repeat_interleave(heads // kv_heads, 1)
            for x in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", query[row].double(), k.double()) / math.sqrt(width)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("hl,lhd->hd", scores.softmax(1), v.double())
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=2e-5)
