"""What the documents promise about twinkle_client: the import swap, typed responses, limits and heartbeats."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.documented.conftest import MODEL
from tests.support.paths import ROOT
from tests.support.servers.running import Server, mock_config
from twinkle_client import LoraConfig, TwinkleClient, init_twinkle_client, types
from twinkle_client.model import MultiLoraTransformersModel

ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, 5]}]
SCRIPT = """
{connection}
import {package}
from {package} import DeviceGroup, Platform, is_master
from {package}.model import MultiLoraTransformersModel

{package}.initialize("local", groups=[DeviceGroup("model", 1, Platform.device_prefix())], seed=3)
model = MultiLoraTransformersModel(model_id="{model}", mixed_precision="fp32", remote_group="model")
model.add_adapter_to_model("some", dict(r=4, lora_alpha=8, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=0.01, adapter_name="some")
losses = []
for _ in range(3):
    model.forward_backward(inputs={rows}, adapter_name="some")
    model.clip_grad_and_step(max_grad_norm=1.0, adapter_name="some")
    losses.append(float(model.calculate_metric(is_training=True, adapter_name="some")["loss"]))
assert is_master()
"""


@pytest.fixture
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[TwinkleClient]:
    with init_twinkle_client(server.url, f"tml-{request.node.name}") as client:
        yield client


def losses(script: str) -> list[float]:
    names: dict[str, list[float]] = {}
    exec(script, names)
    return names["losses"]


def test_row_03_import_swap(server: Server) -> None:
    """tests/cookbook/swap does the same with all local scripts of the cookbook."""
    connect = f"from twinkle_client import init_twinkle_client\ninit_twinkle_client('{server.url}', 'tml-swap')"
    here = losses(SCRIPT.format(connection="", package="twinkle", model=MODEL, rows=ROWS))
    there = losses(SCRIPT.format(connection=connect, package="twinkle_client", model=MODEL, rows=ROWS))
    assert there == pytest.approx(here, abs=1e-5 * max(1, *here))
    assert here[-1] < here[0]


def test_row_20_import_swap_of_the_cookbook() -> None:
    """Every name that a local script imports from the library is there in the client."""
    import ast
    import importlib

    for script in ("transformers/sft_lora", "transformers/multi_lora", "transformers/dpo", "rl/grpo"):
        for node in ast.walk(ast.parse((ROOT / f"cookbook/{script}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "twinkle":
                module = importlib.import_module((node.module or "").replace("twinkle", "twinkle_client", 1))
                for name in node.names:
                    assert hasattr(module, name.name), f"{script}: {node.module}.{name.name}"


def test_row_61_types_of_checkpoints() -> None:
    from twinkle_client.types import checkpoint

    assert checkpoint.ResolvedLoadPath is types.ResolvedLoadPath


def test_row_62_path_of_a_checkpoint() -> None:
    from twinkle_client.types.server import CheckpointPathResponse

    assert set(CheckpointPathResponse.model_fields) == {"path", "twinkle_path"}


def test_row_65_heartbeat_of_a_processor(client: TwinkleClient) -> None:
    from twinkle_client.reward import GSM8KAccuracyReward

    reward = GSM8KAccuracyReward(client=client)
    body = types.ProcessorHeartbeatRequest(processor_id=reward.processor_id).model_dump_json()
    answer = client.post("/processor/twinkle/heartbeat", body.encode())
    assert types.ProcessorHeartbeatResponse.model_validate(answer).status == "ok"


def test_row_66_typed_responses(client: TwinkleClient) -> None:
    model = MultiLoraTransformersModel(MODEL, client=client)
    assert isinstance(model.add_adapter_to_model("some", LoraConfig(r=4)), types.AddAdapterResponse)
    assert isinstance(model.set_optimizer("AdamW", lr=0.01), types.SetOptimizerResponse)
    assert isinstance(model.set_loss("CrossEntropyLoss"), types.SetLossResponse)
    outputs = model.forward_backward(inputs=ROWS)
    assert isinstance(outputs, types.ForwardBackwardResponse)
    assert outputs.model_dump()["result"]["loss"] == pytest.approx(outputs["loss"])
    assert isinstance(model.clip_grad_and_step(), types.ClipGradAndStepResponse)
    metrics = model.calculate_metric(is_training=True)
    assert isinstance(metrics, types.CalculateMetricResponse)
    assert metrics["loss"] == metrics.result["loss"]
    configs = model.get_train_configs()
    assert isinstance(configs, types.GetTrainConfigsResponse)
    assert configs.model_dump() == {"result": str(configs)}
    saved = model.save("first")
    assert isinstance(saved, types.SaveResponse)
    assert str(saved) == saved.twinkle_path


def test_row_67_processor_module() -> None:
    from twinkle_client.processor import base

    assert base.InputProcessor.__name__ == "InputProcessor"


def test_row_68_http_settings(server: Server) -> None:
    from twinkle_client.http import utils

    with init_twinkle_client(server.url, "tml-settings") as client:
        assert utils.get_session_id() == client.session_id
        assert client.base_url == f"{server.url}/api/v1"


def test_row_69_http_requests(server: Server) -> None:
    from twinkle_client.errors import TwinkleClientError
    from twinkle_client.http import http_utils

    with init_twinkle_client(server.url, "tml-requests") as client:
        answer = http_utils.http_get(f"{client.base_url}/healthz")
        assert answer.request.headers["X-Twinkle-Session-Id"] == client.session_id
        with pytest.raises(TwinkleClientError, match="no-such-model"):
            client.post("/model/no-such-model/twinkle/create", b"{}")


def test_row_70_heartbeats() -> None:
    from twinkle_client.client.heartbeat import Heartbeat
    from twinkle_client.http import heartbeat

    assert heartbeat.Heartbeat is Heartbeat


def test_row_73_adapter_max_lifetime(tmp_path: Path) -> None:
    """An adapter ends after its lifetime, although its client is alive, and the error names it."""
    config = mock_config()
    config["applications"][1]["args"]["adapter_config"] = {"adapter_max_lifetime": 1}
    server = Server(tmp_path, config, housekeeping=0.1).start()
    try:
        with init_twinkle_client(server.url, "tml-lifetime") as client:
            model = MultiLoraTransformersModel("mock", client=client)
            model.add_adapter_to_model("some", LoraConfig(r=4))
            model.forward_backward(inputs=ROWS)
            deadline = time.monotonic() + 120
            with pytest.raises(Exception, match="lifetime") as caught:  # noqa: PT012
                while time.monotonic() < deadline:
                    model.forward_backward(inputs=ROWS)
                    time.sleep(0.1)
            assert not isinstance(caught.value, httpx.HTTPError)
    finally:
        server.close()
