"""A model whose trainer is a group of processes: the numbers of a single process, and what ends the group."""

import os
import re
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import tinker
from tinker import types

from tests.on_ray.ray_processes import descendants
from tests.robustness.chaos.chaos_clients import wait_until
from tests.support.servers.running import Server
from tests.support.servers.serving import key_of, logprobs_of, sequences, tinker_data, trainer_data
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainItem, TrainResult

pytestmark = pytest.mark.ray

MODEL = "random://llama-tiny"
SECONDS = 600.0  # for a group to load or to end: this fails a test that hangs, and measures nothing
ADAM = {"learning_rate": 5e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "model_id": MODEL,
        "backend": "transformers",
        "dtype": "fp32",
        "device_group": {"name": "model", "ranks": 2, "device_type": "cpu"},
        "device_mesh": {"dp_size": 2},
    }
    light = [{"ray_actor_options": {"num_cpus": 0}}]
    applications = [
        {"name": "server", "import_path": "server", "deployments": light},
        {"name": "model", "import_path": "model", "args": args, "deployments": light},
    ]
    running = Server(tmp_path_factory.mktemp("group"), {"runtime": "ray", "applications": applications}).start()
    yield running
    assert running.stop() == 0


def test_two_processes_train_as_one_and_come_back_when_one_dies(server):
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of("group"))
    client = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    trainer = Trainer.from_pretrained(MODEL, device="cpu", dtype="fp32")
    trainer.create_adapter("mine", LoraSpec(8, seed=3, train_unembed=True))
    for step in range(4):
        rows = sequences(step, count=3 if step else 1)  # the first request leaves one process without data
        theirs = client.forward_backward(tinker_data(rows), "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        (mine,) = trainer.forward_backward([TrainItem("mine", trainer_data(rows))])
        trainer.optim_step("mine", AdamParams(**ADAM))
        assert isinstance(mine, TrainResult)
        for ours, found in zip(mine.logprobs, logprobs_of(theirs.result()), strict=True):
            np.testing.assert_allclose(found, ours, atol=1e-5)
        if step == 1:
            (one, _) = descendants(server, "ray::TrainerRank")
            os.kill(one, signal.SIGKILL)
    path = client.save_state("last").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    before = client.forward(tinker_data(sequences(9)), "cross_entropy").result()
    after = again.forward(tinker_data(sequences(9)), "cross_entropy").result()
    for ours, found in zip(logprobs_of(before), logprobs_of(after), strict=True):
        np.testing.assert_allclose(found, ours, atol=1e-5)


def test_a_group_in_which_a_rank_hangs_while_it_loads_comes_back(tmp_path):
    args = {
        "model_id": MODEL,
        "backend": "transformers",
        "dtype": "fp32",
        "device_group": {"name": "model", "ranks": 2, "device_type": "cpu"},
        "device_mesh": {"dp_size": 2},
        "group_load_timeout_seconds": 60.0,
    }
    light = [{"ray_actor_options": {"num_cpus": 0}}]
    applications = [
        {"name": "server", "import_path": "server", "deployments": light},
        {"name": "model", "import_path": "model", "args": args, "deployments": light},
    ]
    server = Server(tmp_path, {"runtime": "ray", "applications": applications}, rank_loads=30.0).spawn()
    try:
        earlier = disturb_loading(server, signal.SIGSTOP, set())  # the process reports nothing any more
        earlier |= disturb_loading(server, signal.SIGUSR2, earlier)  # it reports that it gets no further
        wait_until(server.is_healthy, server, SECONDS)
        assert not earlier & set(descendants(server, "ray::TrainerRank"))
        client = tinker.ServiceClient(base_url=server.url, api_key=key_of("group"))
        training = client.create_lora_training_client(base_model=MODEL, rank=8)
        assert logprobs_of(training.forward(tinker_data(sequences(0)), "cross_entropy").result())
    finally:
        server.close()
    log = server.log()
    assert re.search(
        r"rank \d \(dp \d\) on \S+ of the 2 processes of \S+ hangs and could not load: it has given no sign of life",
        log,
    )
    assert re.search(
        r"hangs and could not load: it has got no further for \d+ s, .* it says: loading slowly: \d+ of 30 seconds", log
    )


def disturb_loading(server: Server, number: signal.Signals, earlier: set[int]) -> set[int]:
    """Send a signal to a rank that loads, wait until its group has ended, and return the group's processes."""

    def ranks() -> list[int]:
        return [pid for pid in descendants(server, "ray::TrainerRank.load") if pid not in earlier]

    wait_until(lambda: len(ranks()) == 2, server, SECONDS)
    time.sleep(5.0)  # of the 30 in which they get further
    group = ranks()
    os.kill(group[1], number)
    wait_until(lambda: not set(group) & set(descendants(server, "ray::")), server, SECONDS)
    return set(group)
