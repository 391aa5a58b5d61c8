"""The same adapter on servers with Megatron and with Transformers: losses, checkpoints, scores and greedy tokens.

A server with Transformers hands its data directory to one with Megatron on four processes (tensor × pipeline), which
hands it back.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twinkle

if not (twinkle.exists("ray") and twinkle.exists("megatron-core")):
    pytest.skip("megatron-core or Ray is not installed; `make test-megatron` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import httpx
import tinker
from tinker import types

from tests.support.servers.running import Server
from tests.support.servers.serving import close_clients, key_of, logprobs_of, sequences, tinker_data

pytestmark = pytest.mark.megatron

MODEL = "random://llama-tiny"
ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)
PROMPTS = [row.tolist() for row in sequences(77, count=3)]
GREEDY = types.SamplingParams(max_tokens=12, temperature=0.0)
LIGHT = [{"ray_actor_options": {"num_cpus": 0}}]
CLEAR = 1e-3  # two tokens whose log-probabilities are this far apart have the same order on both servers


def applications(**args: Any) -> list[dict[str, Any]]:
    model = {"model_id": MODEL, "dtype": "fp32", **args}
    return [
        {"name": "server", "import_path": "server", "deployments": LIGHT},
        {"name": "model", "import_path": "model", "args": model, "deployments": LIGHT},
        {
            "name": "sampler",
            "import_path": "sampler",
            "args": {"model_id": MODEL, "sampler_type": "torch"},
            "deployments": LIGHT,
        },
    ]


TRANSFORMERS = {"runtime": "embedded", "applications": applications(backend="transformers", device="cpu")}
MEGATRON = {
    "runtime": "ray",
    "applications": applications(
        backend="megatron",
        device_group={"name": "model", "ranks": 4, "device_type": "cpu"},
        device_mesh={"tp_size": 2, "pp_size": 2},
    ),
}


@dataclass
class Trained:
    """What one server computed: log-probabilities of each step, a checkpoint, what followed it, and its samples."""

    logprobs: list[list[np.ndarray]]
    state: str
    weights: str
    after: list[np.ndarray]
    status: dict[str, Any]
    metrics: str


def train(client: tinker.TrainingClient, seed: int) -> list[np.ndarray]:
    passed = client.forward_backward(tinker_data(sequences(seed)), "cross_entropy")
    client.optim_step(ADAM).result()
    return logprobs_of(passed.result())


def run(server: Server, name: str) -> Trained:
    """Train a fresh adapter for three steps, save it, and go on for one step."""
    client = service_of(server).create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    logprobs = [train(client, seed) for seed in range(3)]
    state = client.save_state(f"state-{name}").result().path
    weights = client.save_weights_for_sampler(f"weights-{name}").result().path
    status = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()["models"][MODEL]
    metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return Trained(logprobs, state, weights, train(client, 3), status, metrics)


def service_of(server: Server) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=key_of("moving"))


def resumed(server: Server, state: str) -> list[np.ndarray]:
    """Load a checkpoint with its optimizer, and take the step that follows it."""
    return train(service_of(server).create_training_client_from_state_with_optimizer(state), 3)


def scores(server: Server, weights: str) -> list[np.ndarray]:
    sampler = service_of(server).create_sampling_client(model_path=weights)
    found = [sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()[1:] for prompt in PROMPTS]
    return [np.array(each, np.float32) for each in found]


def greedy(server: Server, weights: str) -> list[list[int]]:
    sampler = service_of(server).create_sampling_client(model_path=weights)
    return [
        list(sampler.sample(types.ModelInput.from_ints(prompt), 1, GREEDY).result().sequences[0].tokens)
        for prompt in PROMPTS
    ]


def clear_length(server: Server, weights: str, prompt: list[int], tokens: list[int]) -> int:
    """Return how many tokens at the start of a greedy sample were clearly the best."""
    sampler = service_of(server).create_sampling_client(model_path=weights)
    whole = types.ModelInput.from_ints(prompt + tokens)
    answer = sampler.sample(
        whole, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert answer.topk_prompt_logprobs is not None
    for number, best in enumerate(answer.topk_prompt_logprobs[len(prompt) :]):
        assert best is not None
        if best[0][1] - best[1][1] <= CLEAR:
            return number
    return len(tokens)


@dataclass
class Both:
    """What the servers computed, and the one with Transformers, which runs."""

    first: Trained
    second: Trained
    here_on_megatron: list[np.ndarray]  # the step after the checkpoint of Transformers, on Megatron
    scores_on_megatron: list[np.ndarray]  # of the weights that Transformers trained
    greedy_on_megatron: list[list[int]]
    running: Server


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    directory = tmp_path_factory.mktemp("moving")
    server = started(directory, TRANSFORMERS)
    first = run(server, "transformers")
    stopped(server)
    server = started(directory, MEGATRON)
    second = run(server, "megatron")
    moved = resumed(server, first.state)
    scored, sampled = scores(server, first.weights), greedy(server, first.weights)
    stopped(server)
    server = started(directory, TRANSFORMERS)
    yield Both(first, second, moved, scored, sampled, server)
    stopped(server)


def started(directory: Path, config: dict[str, Any]) -> Server:
    return Server(directory, config).start()


def stopped(server: Server) -> None:
    close_clients(server.url)
    assert server.stop() == 0


def near(found: list[np.ndarray], expected: list[np.ndarray], atol: float = 1e-5) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


def test_losses_are_the_same(both: Both) -> None:
    for here, there in zip(both.first.logprobs, both.second.logprobs, strict=True):
        near(there, here)
    near(both.second.after, both.first.after)


def test_a_checkpoint_of_transformers_goes_on_with_megatron(both: Both) -> None:
    near(both.here_on_megatron, both.first.after)


def test_a_checkpoint_of_megatron_goes_on_with_transformers(both: Both) -> None:
    near(resumed(both.running, both.second.state), both.second.after)


def test_prompts_have_the_same_scores(both: Both) -> None:
    near(both.scores_on_megatron, scores(both.running, both.first.weights))
    near(scores(both.running, both.second.weights), scores(both.running, both.first.weights))


def test_greedy_tokens_are_the_same(both: Both) -> None:
    expected = greedy(both.running, both.first.weights)
    compared = 0
    for prompt, here, there in zip(PROMPTS, expected, both.greedy_on_megatron, strict=True):
        clear = clear_length(both.running, both.first.weights, prompt, here)
        assert there[:clear] == here[:clear]
        compared += clear
    assert compared > 0


def test_status_and_metrics_show_the_mesh(both: Both) -> None:
    assert both.first.status["mesh"] == "transformers, 1 process"
    assert both.second.status["mesh"] == "megatron, dp 1 × tp 2 × pp 2, 4 processes"
    (shown,) = [line for line in both.second.metrics.splitlines() if line.startswith("twinkle_model_processes{")]
    assert 'mesh="megatron, dp 1 × tp 2 × pp 2, 4 processes"' in shown
    assert shown.endswith(" 4.0")


def test_adapters_are_priced_by_their_cuts(both: Both) -> None:
    """Four processes hold less than four whole adapters, and more than one, as each has some factors whole."""
    alone, cut = (held_bytes(one.metrics) for one in (both.first, both.second))
    assert alone < cut < 4 * alone


def held_bytes(metrics: str) -> float:
    """Return the host memory that adapters take."""
    start = "twinkle_budget_used_bytes{"
    lines = [line for line in metrics.splitlines() if line.startswith(start) and 'resource="host_adapters"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
