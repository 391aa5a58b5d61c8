"""A trainer of two processes with its sampler in a third: the same samples as in one process, even if it is killed."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import tinker
from tinker import types

from tests.on_ray.ray_processes import descendants
from tests.support.servers.running import Server
from tests.support.servers.serving import key_of, logprobs_of, sequences, tinker_data

pytestmark = pytest.mark.ray

MODEL = "random://llama-tiny"
ADAM = types.AdamParams(learning_rate=5e-4, beta1=0.9, beta2=0.95, eps=1e-8)
PROMPT = [10, 20, 30, 40]
ENGINE = "ray::SamplerEngine"
REAL = {"model_id": MODEL, "backend": "transformers", "dtype": "fp32"}
SAMPLER = {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "torch"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    group = {"name": "model", "ranks": 2, "device_type": "cpu"}
    light = {"deployments": [{"ray_actor_options": {"num_cpus": 0}}]}
    args = {**REAL, "device_group": group, "device_mesh": {"fsdp_size": 2}}
    applications = [
        {"name": "server", "import_path": "server", **light},
        {"name": "model", "import_path": "model", "args": args, **light},
        {**SAMPLER, **light},
    ]
    running = Server(tmp_path_factory.mktemp("apart"), {"runtime": "ray", "applications": applications}).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the same model in one process."""
    args = {**REAL, "device": "cpu"}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": args},
        SAMPLER,
    ]
    running = Server(tmp_path_factory.mktemp("single"), {"runtime": "embedded", "applications": applications}).start()
    yield running
    running.close()


def trained(server: Server, tenant: str) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of(tenant))
    client = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    for step in range(2):
        client.forward_backward(tinker_data(sequences(step)), "cross_entropy")
        client.optim_step(ADAM).result()
    return client


def asked(sampler: tinker.SamplingClient, seed: int, max_tokens: int) -> Any:
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, temperature=0.8)
    return sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params)


def same(ones: list[Any], others: list[Any]) -> None:
    for one, other in zip(ones, others, strict=True):
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            assert mine.tokens == theirs.tokens
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)


def streamed(server: Server, model: str, key: str, kill_after: int | None = None) -> tuple[list[float], int]:
    """Return the log-probabilities of a streamed completion. The engine is killed after ``kill_after`` pieces."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 200, "seed": 5, "logprobs": 0, "stream": True}
    found: list[float] = []
    pieces = 0
    http = httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=180)
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                found += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            pieces += 1
            if pieces == kill_after:
                (engine,) = descendants(server, ENGINE)
                os.kill(engine, signal.SIGKILL)
    return found, pieces


def test_samples_of_a_group_are_those_of_one_process(server, single):
    assert len(descendants(server, "ray::TrainerRank")) == 2
    assert len(descendants(server, ENGINE)) == 1
    mine, theirs = trained(server, "both"), trained(single, "both")
    samplers = [client.save_weights_and_get_sampling_client() for client in (mine, theirs)]
    found, expected = ([asked(sampler, seed, 24).result() for seed in range(3)] for sampler in samplers)
    same(found, expected)

    (row,) = sequences(9, count=1, length=40)
    scored = samplers[0].compute_logprobs(types.ModelInput.from_ints(row.tolist())).result()
    (computed,) = logprobs_of(mine.forward(tinker_data([row]), "cross_entropy").result())
    np.testing.assert_allclose(np.array(scored[1:], np.float32), computed, atol=2e-5)

    mine.forward_backward(tinker_data(sequences(5)), "cross_entropy")
    mine.optim_step(ADAM).result()
    same([asked(samplers[0], 0, 24).result()], expected[:1])  # a version never changes
    path = mine.save_weights_for_sampler("named").result().path
    named = tinker.ServiceClient(base_url=server.url, api_key=key_of("both")).create_sampling_client(model_path=path)
    newest = mine.save_weights_and_get_sampling_client()
    same([asked(named, 0, 24).result()], [asked(newest, 0, 24).result()])


def test_a_killed_engine_is_replaced_and_nobody_hears_of_it(server):
    client = trained(server, "killed")
    sampler = client.save_weights_and_get_sampling_client()
    (before,) = descendants(server, ENGINE)
    futures = [asked(sampler, seed, 200) for seed in range(6)]
    disturbed, pieces = streamed(server, client.model_id, key_of("killed"), kill_after=3)
    found = [future.result() for future in futures]
    assert pieces > 4, "it was killed in the middle"
    assert "the sampler's process died, another takes its place" in server.log()
    assert before not in descendants(server, ENGINE)

    same(found, [asked(sampler, seed, 200).result() for seed in range(6)])
    undisturbed, _ = streamed(server, client.model_id, key_of("killed"))
    assert len(disturbed) == len(undisturbed) == 200
    np.testing.assert_allclose(disturbed, undisturbed, atol=2e-5)


def test_a_replica_that_dies_takes_its_engine_along(server):
    client = trained(server, "replica")
    sampler = client.save_weights_and_get_sampling_client()
    expected = asked(sampler, 1, 24).result()
    (model,) = descendants(server, "ServeReplica:model:model-0")
    (before,) = descendants(server, ENGINE)
    os.kill(model, signal.SIGKILL)
    same([asked(sampler, 1, 24).result()], [expected])
    assert len(descendants(server, ENGINE)) == 1
    assert before not in descendants(server, ENGINE)
