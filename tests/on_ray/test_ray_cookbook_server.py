"""The cookbook's mock server on Ray, unchanged: both protocols, their routes, processors, status and stop."""

import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import tinker
import yaml
from tinker import types

from tests.support.paths import ROOT
from tests.support.servers.running import Server, environment
from twinkle_client import LoraConfig, init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

pytestmark = pytest.mark.ray

FILE = ROOT / "cookbook/client/server/mock/server_config_ray.yaml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = yaml.safe_load(FILE.read_text())
    for replaced in ("data_dir", "http_options"):
        del config[replaced]
    running = Server(tmp_path_factory.mktemp("mock"), {**config, "allowed_dirs": [str(ROOT / "cookbook/data")]}).start()
    yield running
    running.close()


def twinkle_server(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    config = str(server.directory / "config.yaml")
    command = [sys.executable, "-m", "twinkle.server", *arguments, "-c", config]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


def test_tinker(server: Server) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-round-trip")
    training = service.create_lora_training_client(base_model="mock", rank=8)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    losses = []
    for _ in range(3):
        result = training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        losses.append(result.result().metrics["loss:sum"])
    assert losses[-1] < losses[0]
    path = training.save_state("kept").result().path
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=4, seed=1)
    first, again = (sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params).result() for _ in range(2))
    assert first.sequences[0].tokens == again.sequences[0].tokens
    resumed = service.create_training_client_from_state_with_optimizer(path)
    resumed.forward_backward([datum], "cross_entropy").result()
    service.close("success").result()


def test_our_own_client(server: Server) -> None:
    client = init_twinkle_client(server.url, "a-token")
    model = MultiLoraTransformersModel("mock", client=client)
    model.add_adapter_to_model("a", LoraConfig(r=8))
    model.set_optimizer("AdamW", lr=0.1)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, 5]}]
    for _ in range(2):
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
    assert model.save("mine").twinkle_path.startswith("twinkle://")
    responses = Sampler(model).sample([{"input_ids": [1, 2]}], {"max_tokens": 3, "seed": 1}, adapter_name="a")
    assert len(responses[0].sequences[0].tokens) == 3
    dataset = Dataset(DatasetMeta(str(ROOT / "cookbook/data/pirate.jsonl")), client=client)
    assert len(dataset) > 10
    assert len(DataLoader(dataset, batch_size=4)) == -(-len(dataset) // 4)


def test_routes(server: Server) -> None:
    http = httpx.Client(base_url=server.url, headers={"X-API-Key": "tml-routes"}, trust_env=False)
    assert "processor" in http.get("/-/routes").text
    assert http.get("/api/v1/model/mock/healthz").json()["healthy"]
    assert http.get("/api/v1/sampler/mock/healthz").json()["healthy"]
    assert http.get("/api/v1/healthz/ready").json()["ready"]
    assert "Twinkle" in http.get("/dashboard").text
    told = http.get("/metrics").text
    assert 'replica="model-0"' in told
    assert 'replica="gateway-' in told
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert "mock" in names
    body = {"model": "mock", "prompt": "a", "max_tokens": 4, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_status_and_stop(server: Server) -> None:
    told = twinkle_server(server, "status")
    assert told.returncode == 0, told.stderr
    assert "mock" in told.stdout
    stopped = twinkle_server(server, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert server.process is not None
    assert server.process.wait(60) == 0
    again = twinkle_server(server, "stop")
    assert again.returncode == 1
