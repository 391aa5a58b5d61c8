"""``train_mode: full`` on Ray: FSDP2 in two processes trains as a plain loop, and two replicas serve two tenants."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.on_ray.ray_processes import descendants
from tests.support.servers.full_runs import Plain, trained, write_small_model
from tests.support.servers.running import Server
from tests.support.servers.serving import sequences
from twinkle_client import TwinkleClient, init_tinker_client
from twinkle_client.model import MultiLoraTransformersModel

pytestmark = pytest.mark.ray

SHARDED, REPLICATED = "tiny-sharded", "tiny-replicated"
LIGHT = {"ray_actor_options": {"num_cpus": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_small_model(tmp_path_factory.mktemp("models") / SHARDED)
    folder.with_name(REPLICATED).symlink_to(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    """One model in two processes with FSDP2 and a sampler in a process of its own; and one with two replicas."""
    full = {"backend": "transformers", "dtype": "fp32", "train_mode": "full", "max_replayed_steps": 4}
    group = {"name": "model", "ranks": 2, "device_type": "cpu"}
    sharded = {"model_id": str(folder), "device_group": group, "device_mesh": {"fsdp_size": 2}, **full}
    sampler = {"model_id": str(folder), "sampler_type": "torch"}
    replicated = {"model_id": str(folder.with_name(REPLICATED)), "device": "cpu", **full}
    applications = [
        {"name": "server", "import_path": "server", "deployments": [LIGHT]},
        {"name": "model", "import_path": "model", "args": sharded, "deployments": [LIGHT]},
        {"name": "sampler", "import_path": "sampler", "args": sampler, "deployments": [LIGHT]},
        {"name": "copies", "import_path": "model", "args": replicated, "deployments": [{"num_replicas": 2, **LIGHT}]},
    ]
    running = Server(tmp_path_factory.mktemp("full"), {"runtime": "ray", "applications": applications}).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def sdk(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tinker.ServiceClient]]:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.setenv(name, "")
    services: list[tinker.ServiceClient] = []

    def make(tenant: str) -> tinker.ServiceClient:
        init_tinker_client(server.url, f"tml-{tenant}")
        services.append(tinker.ServiceClient())
        return services[-1]

    yield make
    for service in services:
        service.close("success").result()


def test_two_processes_with_fsdp_train_as_a_plain_loop(server, sdk, folder):
    """Also after the death of one of the processes, and from a checkpoint."""
    plain, service = Plain(folder), sdk("sharded")
    training = service.create_full_training_client(SHARDED)
    base = service.create_sampling_client(base_model=SHARDED)
    prompt = sequences(99, count=1)[0]
    with torch.no_grad():
        expected_base = plain.logprobs(prompt).numpy()
    for step in range(6):
        rows = sequences(step, count=3 if step else 1)  # the first request leaves one process without data
        assert trained(training, rows) == pytest.approx(plain.train(rows), rel=1e-5)
        if step == 2:
            (one, _) = descendants(server, "ray::TrainerRank")
            os.kill(one, signal.SIGKILL)
    saved = training.save_state("last").result().path
    run, _, name = saved.removeprefix("tinker://").split("/")
    (file,) = (server.data_dir / "checkpoints" / run.replace(":", "-") / "weights" / name).rglob("model.safetensors")
    found = load_file(file)
    for parameter, tensor in plain.model.named_parameters():
        torch.testing.assert_close(found[parameter], tensor, atol=1e-5, rtol=1e-5)
    version = training.save_weights_and_get_sampling_client()
    tokens = types.ModelInput.from_ints(prompt.tolist())
    with torch.no_grad():
        expected = plain.logprobs(prompt).numpy()
    for sampler, wanted in ((version, expected), (base, expected_base), (version, expected)):
        np.testing.assert_allclose(np.array(sampler.compute_logprobs(tokens).result()[1:]), wanted, atol=2e-5)
    later = [plain.train(sequences(step)) for step in (7, 8)]
    service.close("success").result()
    again = sdk("sharded").create_training_client_from_state_with_optimizer(saved)
    for step, loss in zip((7, 8), later, strict=True):
        assert trained(again, sequences(step)) == pytest.approx(loss, rel=1e-5)


def test_native_verbs_reach_all_processes(server, folder):
    """The model is that of a fresh replica again, whoever held it before."""
    plain, client = Plain(folder), TwinkleClient(server.url, "tml-native")
    model = MultiLoraTransformersModel(SHARDED, client=client)
    model.add_adapter_to_model("policy", None)
    count = sum(parameter.numel() for parameter in plain.model.parameters())
    assert f"{count:,} parameters" in str(model.get_train_configs())
    model.set_optimizer("Adam", lr=1e-3, betas=[0.9, 0.95], eps=1e-6, weight_decay=0.0)
    model.set_loss("CrossEntropyLoss", reduction="sum")
    for step in range(2):
        rows = sequences(step)
        features = [{"input_ids": row[:-1].tolist(), "labels": row[1:].tolist()} for row in rows]
        loss = -sum(plain.logprobs(row).sum() for row in rows)
        (loss / sum(len(row) - 1 for row in rows)).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        assert float(model.forward_backward(features)["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
        model.clip_grad_and_step(max_grad_norm=1e9)
    client.close()


def test_two_replicas_serve_two_tenants_at_once(sdk, folder):
    plain = [Plain(folder), Plain(folder)]
    services = [sdk("one"), sdk("two"), sdk("three")]
    runs = [service.create_full_training_client(REPLICATED) for service in services[:2]]
    with pytest.raises(tinker.RequestFailedError) as caught:
        services[2].create_full_training_client(REPLICATED)
    assert re.search("its 2 replicas have been held, the first since .* silent until then", str(caught.value))
    assert not any(each.holder.get_session_id() in str(caught.value) for each in services[:2])
    for step in range(3):
        for number in (0, 1):
            rows = sequences(100 * number + step)
            assert trained(runs[number], rows) == pytest.approx(plain[number].train(rows), rel=1e-5)
    services[0].close("success").result()
    third = services[2].create_full_training_client(REPLICATED)
    rows = sequences(7)
    assert trained(third, rows) == pytest.approx(Plain(folder).train(rows), rel=1e-5)
    assert trained(runs[1], rows) == pytest.approx(plain[1].train(rows), rel=1e-5)
