"""What a server with a real model reports about the SDK's requests, above all the gap between trainer and sampler."""

import pytest
import tinker
from tinker import types

from tests.support.servers.exposition import scrape, value
from tests.support.servers.serving import MODEL, SAMPLER, SdkServer

pytestmark = pytest.mark.skipif(SAMPLER == "mock", reason="the mock's sampler and trainer make up numbers of their own")

PROMPT = [5, 6, 7, 8]
# mean |Δ| in fp32: with the same code (torch), and with another engine (vllm)
TOLERANCE = {"torch": 1e-4, "vllm": 2e-2}


def rollout(sampler: tinker.SamplingClient) -> types.Datum:
    """Return a sample as a datum, in the form that cookbooks send: with zeros for the prompt."""
    params = types.SamplingParams(max_tokens=16, seed=3, temperature=1.0, stop=[])
    sample = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0]
    tokens, before = PROMPT + sample.tokens, len(PROMPT) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(sample.logprobs),
            "advantages": [0.0] * before + [1.0] * len(sample.tokens),
        },
    )


def gap(server: SdkServer) -> tuple[float, float, float]:
    seen = scrape(server.url)
    names = ("twinkle_logprob_gap_count", "twinkle_logprob_gap_sum", "twinkle_logprob_kl_sum")
    count, distance, divergence = (value(seen, name, model=MODEL) for name in names)
    return count, distance, divergence


def test_the_gap_is_small_on_fresh_rollouts_and_grows_with_the_policy(
    server: SdkServer, service: tinker.ServiceClient
) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1)
    data = [rollout(training.save_weights_and_get_sampling_client())]
    distances, divergences = [], []
    before = gap(server)
    for _ in range(2):
        training.forward_backward(data, "importance_sampling").result()
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
        after = gap(server)
        assert after[0] == before[0] + 1
        distances.append(after[1] - before[1])
        divergences.append(after[2] - before[2])
        before = after
    assert distances[0] < TOLERANCE[SAMPLER]
    assert divergences[0] < TOLERANCE[SAMPLER]
    assert distances[1] > 10 * TOLERANCE[SAMPLER]  # the step changed the policy
    assert divergences[1] > divergences[0]


def test_tokens_and_adapters_are_counted(server: SdkServer, service: tinker.ServiceClient) -> None:
    before = scrape(server.url)
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1)
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=5, seed=3, stop=[])
    sampler.sample(types.ModelInput.from_ints(PROMPT), 3, params).result()
    row = types.Datum(model_input=types.ModelInput.from_ints(PROMPT), loss_fn_inputs={"target_tokens": PROMPT})
    training.forward([row, row], "cross_entropy").result()
    after = scrape(server.url)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("twinkle_sampled_tokens_total") == 15
    assert grown("twinkle_prompt_tokens_total") == len(PROMPT)
    assert grown("twinkle_trained_tokens_total", kind="forward") == 2 * len(PROMPT)
    assert value(after, "twinkle_padding_ratio", model=MODEL) == 0
    assert value(after, "twinkle_adapters", place="device") >= 1
