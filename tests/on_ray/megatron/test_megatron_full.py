"""``train_mode: full`` with ``backend: megatron`` on Ray: two data ranks of two tensor parallel ranks each."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import twinkle

if not (twinkle.exists("ray") and twinkle.exists("megatron-core")):
    pytest.skip("megatron-core or Ray is not installed; `make test-megatron` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.support.models.full_runs import Plain, trained, write_small_model
from tests.support.servers.running import Server
from tests.support.servers.serving import close_clients, key_of, sequences
from twinkle_client import init_tinker_client

pytestmark = pytest.mark.megatron

NAME = "tiny-full"
LIGHT = [{"ray_actor_options": {"num_cpus": 0}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    args = {
        "model_id": str(folder),
        "backend": "megatron",
        "dtype": "fp32",
        "train_mode": "full",
        "device_group": {"name": "model", "ranks": 4, "device_type": "cpu"},
        "device_mesh": {"dp_size": 2, "tp_size": 2},
    }
    sampler = {"model_id": str(folder), "sampler_type": "torch"}
    applications = [
        {"name": "server", "import_path": "server", "deployments": LIGHT},
        {"name": "model", "import_path": "model", "args": args, "deployments": LIGHT},
        {"name": "sampler", "import_path": "sampler", "args": sampler, "deployments": LIGHT},
    ]
    running = Server(tmp_path_factory.mktemp("full"), {"runtime": "ray", "applications": applications}).start()
    yield running
    close_clients(running.url)
    assert running.stop() == 0


def test_all_parameters_are_trained_as_in_a_plain_loop(server: Server, folder: Path) -> None:
    init_tinker_client(server.url, key_of("full"))  # adds create_full_training_client to the SDK
    plain = Plain(folder)
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of("full"))
    training = service.create_full_training_client(NAME)
    for step in range(3):
        rows = sequences(step, count=3 if step else 1)  # the first request leaves one data rank without rows
        assert trained(training, rows) == pytest.approx(plain.train(rows), rel=1e-5)
    saved = training.save_state("last").result().path
    run, _, name = saved.removeprefix("tinker://").split("/")
    (file,) = (server.data_dir / "checkpoints" / run.replace(":", "-") / "weights" / name).rglob("model.safetensors")
    found = load_file(file)
    for parameter, tensor in plain.model.named_parameters():
        torch.testing.assert_close(found[parameter], tensor, atol=1e-5, rtol=1e-5)
    prompt = sequences(99, count=1)[0]
    version = training.save_weights_and_get_sampling_client()
    scores = version.compute_logprobs(types.ModelInput.from_ints(prompt.tolist())).result()[1:]
    with torch.no_grad():
        np.testing.assert_allclose(np.array(scores), plain.logprobs(prompt).numpy(), atol=2e-5)
    later = plain.train(sequences(7))
    service.close("success").result()
    again = tinker.ServiceClient(base_url=server.url, api_key=key_of("full"))
    resumed = again.create_training_client_from_state_with_optimizer(saved)
    assert trained(resumed, sequences(7)) == pytest.approx(later, rel=1e-5)
