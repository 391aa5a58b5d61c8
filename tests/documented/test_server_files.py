"""The documents' YAML files of a server: what check-config says about them, and what a server does with their values.

``yaml/`` holds the files word for word. test_on_ray.py launches them on Ray.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.documented.conftest import MODEL
from tests.support.paths import SOURCE
from tests.support.servers.running import Server, free_port
from twinkle.server.cli import command_line as cli

YAML = Path(__file__).parent / "yaml"
QWEN = "Qwen/Qwen2.5-7B-Instruct"

Check = Callable[[Mapping[str, Any]], str]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """``check(config)`` runs check-config, which must accept the configuration, and returns its notes."""

    def check(config: Mapping[str, Any]) -> str:
        file = tmp_path / "server_config.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        assert cli.main(["check-config", "-c", str(file)]) == 0, capsys.readouterr().err
        return capsys.readouterr().err

    return check


def documented(name: str = "twinkle") -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((YAML / f"{name}.yaml").read_text())
    return config


def on_this_machine(config: Mapping[str, Any], port: int = 8000) -> dict[str, Any]:
    """Return the configuration with a tiny model, a CPU and another port, and nothing else changed."""
    text = json.dumps(config).replace("cuda", "cpu").replace(f"ms://{QWEN}", MODEL)
    changed: dict[str, Any] = json.loads(text)
    changed["http_options"]["port"] = port
    return changed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the documented Twinkle file, in one process instead of Ray's: ``runtime: embedded``.

    One process trains, so the model has one rank instead of two.
    """
    running = Server(tmp_path_factory.mktemp("twinkle-yaml"))
    config = on_this_machine(documented(), running.port)
    args = config["applications"][1]["args"]
    args["nproc_per_node"], args["device_group"]["ranks"], args["device_mesh"]["mesh"] = 1, [0], [0]
    running.configure({**config, "runtime": "embedded", "data_dir": str(running.data_dir)})
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    """The key that the server has generated and written to its data directory."""
    return (server.data_dir / "generated-key").read_text().strip()


@pytest.mark.parametrize("kind", ["twinkle", "tinker"])
def test_row_01_two_server_modes(check: Check, kind: str) -> None:
    config = on_this_machine(documented())
    assert "server_type: dropped, one server speaks both protocols" in check({**config, "server_type": kind})


def test_row_37_server_type_in_the_file(check: Check) -> None:
    assert documented()["server_type"] == "twinkle"
    check(on_this_machine(documented()))


def test_row_38_host_of_all_interfaces(server: Server, key: str) -> None:
    """The server listens on all interfaces, and only its generated key opens it."""
    assert server.config["http_options"]["host"] == "0.0.0.0"
    assert key.startswith("tml-")
    url = f"{server.url}/api/v1/get_server_capabilities"
    assert httpx.get(url, headers={"X-API-Key": key}, trust_env=False).status_code == 200
    refused = httpx.get(url, headers={"X-API-Key": "EMPTY_TOKEN"}, trust_env=False)
    assert refused.status_code == 401
    assert "TINKER_API_KEY" in refused.text
    assert "TWINKLE_SERVER_TOKEN" in refused.text


def test_row_39_server_prefix(server: Server, key: str) -> None:
    http = httpx.Client(base_url=server.url, headers={"X-API-Key": key}, trust_env=False)
    assert http.get("/server/healthz").json() == http.get("/api/v1/healthz").json()
    older, newer = (http.get(f"{prefix}/get_server_capabilities") for prefix in ("/server", "/api/v1/twinkle"))
    assert older.status_code == newer.status_code == 200
    assert older.json() == newer.json()


def test_row_41_autoscaling(check: Check) -> None:
    """A model's replicas hold adapters, so ``max_replicas`` of them are there from the start."""
    config = on_this_machine(documented())
    config["applications"][1]["deployments"][0]["autoscaling_config"]["max_replicas"] = 3
    notes = check(config)
    assert "applications[1].deployments[0].autoscaling_config" in notes
    assert "3" in notes


def test_row_43_model_prefix(server: Server, key: str) -> None:
    http = httpx.Client(base_url=server.url, headers={"X-API-Key": key}, trust_env=False)
    assert server.config["applications"][1]["route_prefix"] == f"/models/{QWEN}"
    assert http.get(f"/models/{QWEN}/healthz").json()["healthy"]
    assert http.get(f"/api/v1/model/{QWEN}/healthz").json()["healthy"]


def test_row_45_processor_prefix(server: Server, key: str) -> None:
    http = httpx.Client(base_url=server.url, headers={"X-API-Key": key}, trust_env=False)
    session = http.post("/api/v1/twinkle/create_session", json={}).json()["session_id"]
    body = {"processor_type": "reward", "class_type": "GSM8KAccuracyReward"}
    header = {"X-Twinkle-Session-Id": session}
    created = http.post("/processors/twinkle/create", json=body, headers=header)
    assert created.status_code == 200, created.text
    assert created.json()["processor_id"]


def test_row_46_processes_of_a_processor(check: Check) -> None:
    """A session with processors has a process of its own, however many there are."""
    notes = check(on_this_machine(documented()))
    for name in ("nproc_per_node", "ncpu_proc_per_node"):
        assert f"applications[2].args.{name}: has no effect" in notes


def test_row_47_devices_of_a_processor(check: Check) -> None:
    notes = check(on_this_machine(documented()))
    for name in ("device_group.ranks", "device_mesh"):
        assert f"applications[2].args.{name}: has no effect" in notes


def test_row_50_tinker_file(check: Check) -> None:
    """The file is valid; notes say what the cluster must have."""
    notes = check(documented("tinker"))
    assert "applications[1].args: megatron, dp 2 × tp 1 × pp 1, 2 processes" in notes


def test_row_51_samplers(check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are valid, another one is not. tests/sampler/vllm samples with vLLM."""
    config = on_this_machine(documented())
    args = {"model_id": MODEL}
    config["applications"].append({"name": "sampler", "import_path": "sampler", "args": args})
    for kind in ("vllm", "torch"):
        args["sampler_type"] = kind
        check(config)
    args["sampler_type"] = "other"
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["check-config", "-c", str(tmp_path / "bad.yaml")]) == 2
    assert "applications[3].args.sampler_type: got 'other', allowed: " in capsys.readouterr().err


def test_row_52_applications_of_both_modes(check: Check) -> None:
    """Processors and samplers serve the clients of both protocols, so either file may have both."""
    config = on_this_machine(documented())
    args = {"model_id": MODEL, "sampler_type": "torch"}
    config["applications"].append({"name": "sampler", "import_path": "sampler", "args": args})
    for kind in ("twinkle", "tinker"):
        check({**config, "server_type": kind})


@pytest.mark.parametrize("dimension", ["tp", "pp"])
def test_row_53_dimensions_of_a_mesh(
    check: Check, dimension: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data parallelism works. What launch would refuse, check-config refuses."""
    config = on_this_machine(documented())
    check(config)
    config["applications"][1]["args"]["device_mesh"]["mesh_dim_names"] = [dimension]
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["check-config", "-c", str(tmp_path / "bad.yaml")]) == 2
    said = capsys.readouterr().err
    assert "applications[1].args.device_mesh" in said
    assert dimension in said


def test_row_64_tinker_prefix(server: Server, key: str) -> None:
    http = httpx.Client(base_url=server.url, headers={"X-API-Key": key}, trust_env=False)
    newer = http.get("/api/v1/get_server_capabilities").json()
    assert http.get("/tinker/get_server_capabilities").json() == newer
    assert http.get("/api/v1/tinker/get_server_capabilities").json() == newer


def test_row_74_proxy_between_deployments() -> None:
    """On Ray, a request reaches its replica as a call of a Serve handle. No HTTP client is involved."""
    folder = SOURCE / "twinkle/server/runtime/ray"
    sources = {name: (folder / name).read_text() for name in ("router.py", "remote_replica.py")}
    assert "DeploymentHandle" in sources["remote_replica.py"]
    for name, text in sources.items():
        assert not re.search(r"^\s*(import|from) (aiohttp|httpx|requests|urllib\.request)\b", text, re.MULTILINE), name


def test_row_91_platforms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library knows NPUs; the server's devices are CPUs and NVIDIA's GPUs."""
    config = on_this_machine(documented(), free_port())
    config["applications"][1]["args"]["device_group"]["device_type"] = "npu"
    (tmp_path / "npu.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["check-config", "-c", str(tmp_path / "npu.yaml")]) == 2
    assert "applications[1].args.device_group.device_type: got 'npu', allowed: " in capsys.readouterr().err
