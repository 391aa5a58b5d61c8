"""Sampling with the unmodified SDK."""

import itertools
import math
import pickle
import time

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.resources.weights import AsyncWeightsResource

from tests.support.servers.serving import (
    ALIAS,
    MODEL,
    SAMPLER,
    SdkServer,
    eventually,
    logprobs_of,
    sequences,
    tinker_data,
    waiting_samples,
)

ADAM = types.AdamParams(learning_rate=3e-2, eps=1e-8)
PROMPT = types.ModelInput.from_ints([10, 20, 30, 40])
TOLERANCE = 2e-5  # the same numbers computed in two ways, in fp32
VOCABULARY = 512
real_numbers = pytest.mark.skipif(SAMPLER == "mock", reason="the mock's numbers are made up")


def params(**changes: object) -> types.SamplingParams:
    return types.SamplingParams(**({"max_tokens": 8, "seed": 1, "stop": []} | changes))


def draw(sampler: tinker.SamplingClient, count: int = 1, **changes: object) -> list[tuple[int, ...]]:
    response = sampler.sample(PROMPT, count, params(**changes)).result()
    return [tuple(sequence.tokens) for sequence in response.sequences]


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = service.create_lora_training_client(base_model=ALIAS, rank=8, seed=3)
    train(client)
    return client


def train(client: tinker.TrainingClient) -> None:
    client.forward_backward(tinker_data(sequences(1)), "cross_entropy")
    client.optim_step(ADAM).result()


def test_base_model_without_training(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    response = sampler.sample(PROMPT, 3, params(seed=None)).result()
    assert len(response.sequences) == 3
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == 8
        assert sequence.stop_reason == "length"
        assert all(logprob <= 0 for logprob in sequence.logprobs)
    assert sampler.get_base_model() == MODEL


def test_a_snapshot_does_not_change(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    before = draw(sampler, 2, temperature=1.0), sampler.compute_logprobs(PROMPT).result()
    for _ in range(3):
        train(training)
    assert (draw(sampler, 2, temperature=1.0), sampler.compute_logprobs(PROMPT).result()) == before
    later = training.save_weights_and_get_sampling_client()
    assert later.compute_logprobs(PROMPT).result() != before[1]


def test_a_publication_whose_answer_is_lost(training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK sends the request again with the same seq_id, but with the next number of a sampling session."""
    sent: list[int] = []
    original = AsyncWeightsResource.save_for_sampler

    async def save(weights: AsyncWeightsResource, *, request: types.SaveWeightsForSamplerRequest, **options: object):
        answer = await original(weights, request=request, **options)
        sent.append(request.sampling_session_seq_id)
        if len(sent) == 1:
            raise tinker.APIConnectionError(request=httpx.Request("POST", "http://lost"))
        return answer

    monkeypatch.setattr(AsyncWeightsResource, "save_for_sampler", save)
    sampler = training.save_weights_and_get_sampling_client()
    assert sent == [0, 1]
    before = sampler.compute_logprobs(PROMPT).result()
    train(training)
    later = training.save_weights_and_get_sampling_client()
    assert sampler.compute_logprobs(PROMPT).result() == before
    assert later.compute_logprobs(PROMPT).result() != before


def test_sampler_and_trainer_agree(training: tinker.TrainingClient) -> None:
    (row,) = sequences(9, count=1, length=40)
    sampler = training.save_weights_and_get_sampling_client()
    found = sampler.compute_logprobs(types.ModelInput.from_ints(row.tolist())).result()
    (expected,) = logprobs_of(training.forward(tinker_data([row]), "cross_entropy").result())
    assert found[0] is None
    np.testing.assert_allclose(np.array(found[1:], np.float32), expected, atol=2e-5)


def test_named_saves(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler("named").result().path
    state = training.save_state("state").result().path
    unnamed = training.save_weights_and_get_sampling_client()
    expected = unnamed.compute_logprobs(PROMPT).result()[1:]
    for model_path in (path, state):
        sampler = service.create_sampling_client(model_path=model_path)
        np.testing.assert_allclose(sampler.compute_logprobs(PROMPT).result()[1:], expected, atol=2e-5)
        assert sampler.get_base_model() == ALIAS
    both = service.create_sampling_client(model_path=path, base_model=MODEL)
    np.testing.assert_allclose(both.compute_logprobs(PROMPT).result()[1:], expected, atol=2e-5)


def test_seeds(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    first = draw(sampler, 4)
    assert first == draw(sampler, 4)
    assert len(set(first)) > 1
    assert first != draw(sampler, 4, seed=2)
    assert draw(sampler, seed=None) != draw(sampler, seed=None)
    assert draw(sampler, seed=2**63 + 5) == draw(sampler, seed=2**63 + 5)


@real_numbers
def test_temperature(training: tinker.TrainingClient) -> None:
    """Temperature 0 is greedy; log-probabilities are those of the tempered distribution."""
    sampler = training.save_weights_and_get_sampling_client()
    greedy = draw(sampler, 2, temperature=0.0, seed=None)
    assert greedy[0] == greedy[1] == draw(sampler, temperature=1.0, top_k=1)[0]
    prompt = types.ModelInput.from_ints([1, 2, 3])
    by_token: dict[float, dict[int, float]] = {}
    for temperature in (1.0, 2.0):
        response = sampler.sample(prompt, 64, params(max_tokens=1, temperature=temperature)).result()
        by_token[temperature] = {s.tokens[0]: s.logprobs[0] for s in response.sequences}
    shared = sorted(set(by_token[1.0]) & set(by_token[2.0]))
    assert len(shared) >= 2
    for a, b in itertools.pairwise(shared):
        difference = by_token[1.0][a] - by_token[1.0][b]
        assert by_token[2.0][a] - by_token[2.0][b] == pytest.approx(difference / 2, abs=1e-3)


@real_numbers
def test_stops(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    (full,) = draw(sampler, max_tokens=64)
    stop = full[5]
    response = sampler.sample(PROMPT, 1, params(max_tokens=64, stop=[stop])).result().sequences[0]
    assert tuple(response.tokens) == full[: full.index(stop) + 1]
    assert response.stop_reason == "stop"
    assert len(response.logprobs) == len(response.tokens)
    tokenizer = training.get_tokenizer()
    text = next(text for token in full if (text := tokenizer.decode([token])).isalnum() and text.isascii())
    for form in (text, [text]):
        stopped = sampler.sample(PROMPT, 1, params(max_tokens=64, stop=form)).result().sequences[0]
        assert text in tokenizer.decode(stopped.tokens)
        assert text not in tokenizer.decode(stopped.tokens[:-1])
        assert stopped.stop_reason == "stop"


def test_prompt_logprobs_with_samples(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    response = sampler.sample(PROMPT, 2, params(), include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert response.prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == pytest.approx(sampler.compute_logprobs(PROMPT).result()[1:], abs=TOLERANCE)
    assert response.topk_prompt_logprobs[0] is None
    for scored, top in zip(response.prompt_logprobs[1:], response.topk_prompt_logprobs[1:], strict=True):
        assert len(top) == 3
        assert [lp for _, lp in top] == sorted((lp for _, lp in top), reverse=True)
        assert scored <= top[0][1] + 1e-6


def test_topk_of_what_is_sampled(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    response = sampler.sample(PROMPT, 2, params(temperature=0.0), topk_sample_logprobs=3).result()
    for sequence in response.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert len(top) == 3
            assert [lp for _, lp in top] == sorted((lp for _, lp in top), reverse=True)
            assert top[0] == (token, pytest.approx(logprob, abs=TOLERANCE))


@real_numbers
def test_topk_of_what_is_sampled_is_tempered(training: tinker.TrainingClient) -> None:
    """The probabilities of the whole vocabulary add up to one at every temperature."""
    sampler = training.save_weights_and_get_sampling_client()
    for temperature in (0.5, 1.0, 2.0):
        wanted = params(max_tokens=3, temperature=temperature)
        (sequence,) = sampler.sample(PROMPT, 1, wanted, topk_sample_logprobs=VOCABULARY).result().sequences
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert dict(top)[token] == pytest.approx(logprob, abs=TOLERANCE)
            assert sum(math.exp(lp) for _, lp in top) == pytest.approx(1, abs=1e-3)


def test_targets(training: tinker.TrainingClient) -> None:
    """The log-probabilities of target tokens, dense or sparse, equal those from other options."""
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(list(range(10, 40)))
    scored = sampler.sample(
        prompt, 1, params(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    ids = torch.full((29, 3), -1)
    expected = torch.zeros(29, 3)
    for row in (3, 28):
        ids[row, 0], expected[row, 0] = 10 + row + 1, scored.prompt_logprobs[row + 1]
        ids[row, 2], expected[row, 2] = scored.topk_prompt_logprobs[row + 1][1]
    for targets in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
        found = sampler.sample(prompt, 1, params(max_tokens=1), target_prompt_logprobs=targets).result()
        returned = found.target_prompt_logprobs
        assert returned.shape == [29, 3]
        assert returned.sparse_crow_indices == targets.sparse_crow_indices
        assert returned.sparse_col_indices == targets.sparse_col_indices
        torch.testing.assert_close(returned.to_torch(), expected, atol=TOLERANCE, rtol=0)


def test_draws_at_every_position(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    found = sampler.sample(PROMPT, 1, params(max_tokens=1), prompt_alt_tokens_k=8).result().prompt_alt_tokens
    tokens, logprobs = found.tokens.to_torch(), found.logprobs.to_torch()
    assert tokens.shape == logprobs.shape == (3, 8)
    assert len(set(tokens.flatten().tolist())) > 3
    targets = types.TensorData.from_torch(tokens)
    same = sampler.sample(PROMPT, 1, params(max_tokens=1), target_prompt_logprobs=targets).result()
    torch.testing.assert_close(same.target_prompt_logprobs.to_torch(), logprobs, atol=TOLERANCE, rtol=0)


def test_only_the_end_of_a_prompt(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    whole = sampler.compute_logprobs(PROMPT).result()
    part = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result()
    assert part[:2] == [None, None]
    assert part[2:] == pytest.approx(whole[2:], abs=TOLERANCE)
    targets = types.TensorData.from_torch(torch.tensor([[20], [30], [40]]))
    response = sampler.sample(
        PROMPT,
        1,
        params(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_logprobs_last_n=1,
    ).result()
    assert [row is None for row in response.topk_prompt_logprobs] == [True, True, True, False]
    # Target tokens are scored at every position.
    assert response.target_prompt_logprobs.data == pytest.approx(whole[1:], abs=TOLERANCE)


@pytest.mark.complaint("non-retryable error")
def test_mistakes(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    long = types.ModelInput.from_ints([1] * 100_000)
    for prompt, changes, text in (
        (types.ModelInput.from_ints([10**6]), {}, "prompt"),
        (types.ModelInput.from_ints([]), {}, "prompt"),
        (long, {}, "prompt"),
        (PROMPT, {"max_tokens": 10**6}, "max_tokens"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=text) as error:
            sampler.sample(prompt, 1, params(**changes)).result()
        assert error.value.category == types.RequestErrorCategory.User
    for options in (
        {"topk_sample_logprobs": 10**6},
        {"prompt_alt_tokens_k": 10**6},
        {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 4},
        {"target_prompt_logprobs": types.TensorData.from_torch(torch.tensor([[1], [2]]))},
        {"target_prompt_logprobs": types.TensorData.from_torch(torch.full((3, 2), -1))},
        {"target_prompt_logprobs": types.TensorData.from_torch(torch.tensor([[1], [2], [10**6]]))},
    ):
        with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=next(reversed(options))[:17]):
            sampler.sample(PROMPT, 1, params(), **options).result()
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path="tinker://s-0:train:0/sampler_weights/none")


def test_many_at_once_and_pickled_clients(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(PROMPT, 2, params(seed=seed)) for seed in range(100)]
    texts = [[tuple(s.tokens) for s in future.result().sequences] for future in futures]
    assert texts[7] == draw(sampler, 2, seed=7)
    copied = pickle.loads(pickle.dumps(sampler))
    assert draw(copied, 2, seed=7) == texts[7]
    assert all(math.isfinite(lp) for lp in futures[0].result().sequences[0].logprobs)


def test_giving_up_stops_the_work(server: SdkServer, training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    slow = [sampler.sample(PROMPT, 16, params(max_tokens=1500)) for _ in range(16)]
    eventually(lambda: waiting_samples(server) >= 16)
    time.sleep(1)  # the SDK can cancel a request only after it received its id
    for future in slow:
        future.cancel()
    eventually(lambda: waiting_samples(server) == 0)
    assert len(draw(sampler)[0]) == 8
