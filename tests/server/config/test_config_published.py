"""Published configurations for servers of this kind load without changes.

Those without Megatron and vLLM launch, and so does the one for Transformers without its vLLM sampler.

A server on the network without configured keys generates one, and Redis and JSON files become SQLite, each with a note.
"""

import json
from typing import Any

import httpx
import pytest
import yaml

from tests.support.servers.running import Server
from twinkle.errors import TwinkleServerError
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig, load_config
from twinkle.server.config.rules import refuse_a_file_for_several_machines

TINY = "random://llama-tiny"
QUEUE = {"rps_limit": 100, "tps_limit": 100_000}


def gateway(model: str) -> dict[str, Any]:
    return {
        "name": "server",
        "route_prefix": "/api/v1",
        "import_path": "server",
        "args": {"server_config": {"per_token_model_limit": 3}, "supported_models": [model]},
        "deployments": [
            {
                "name": "GatewayServer",
                "max_ongoing_requests": 50,
                "autoscaling_config": {"min_replicas": 1, "max_replicas": 1, "target_ongoing_requests": 128},
                "ray_actor_options": {"num_cpus": 0.1, "runtime_env": {"env_vars": {"TWINKLE_TRUST_REMOTE_CODE": "0"}}},
            }
        ],
    }


def placed(kind: str, processes: int, device: str = "cuda", group: dict[str, Any] | None = None, **sizes: int) -> Any:
    return {
        "nproc_per_node": processes,
        "device_group": {"name": kind, "ranks": processes, "device_type": device, **(group or {})},
        "device_mesh": {"device_type": device, **sizes},
    }


def application(kind: str, model: str, variables: dict[str, str], **args: Any) -> dict[str, Any]:
    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": variables}}
    return {
        "name": f"{kind}s-{model}",
        "route_prefix": f"/api/v1/{kind}/{model}",
        "import_path": kind,
        "args": {"model_id": f"ms://{model}", **args},
        "deployments": [{"name": kind, "num_replicas": 1, "ray_actor_options": options}],
    }


def processor() -> dict[str, Any]:
    args = {**placed("processor", 2, "CPU", dp_size=2), "ncpu_proc_per_node": 2}
    del args["nproc_per_node"]
    return {"name": "processor", "route_prefix": "/api/v1/processor", "import_path": "processor", "args": args}


def transformer() -> dict[str, Any]:
    name, variables = "Qwen/Qwen3.5-4B", {"TWINKLE_TRUST_REMOTE_CODE": "1", "TWINKLE_FAIL_FAST": "0"}
    engine = {"max_model_len": 4096, "gpu_memory_utilization": 0.5, "enable_lora": True}
    model = {"backend": "transformers", "max_length": 10_240, "queue_config": QUEUE, **placed("model", 1, dp_size=1)}
    model["adapter_config"] = {"adapter_timeout": 30}
    sampler = {"sampler_type": "vllm", "engine_args": engine, "queue_config": QUEUE, **placed("sampler", 1, dp_size=1)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "telemetry": {"enabled": False, "otlp_endpoint": "http://localhost:4317"},
        "persistence": {"mode": "file", "file_path": "/tmp/twinkle_state.json"},
        "applications": [
            gateway(name),
            application("model", name, variables, **model),
            application("sampler", name, variables, **sampler),
            processor(),
        ],
    }


def megatron() -> dict[str, Any]:
    name = "Qwen/Qwen3.6-27B"
    variables = {
        "TWINKLE_TRUST_REMOTE_CODE": "0",
        "TWINKLE_LONG_POLL_TIMEOUT": "120",
        "TWINKLE_FAIL_FAST": "0",
    }
    engine = {"max_model_len": 32_768, "max_loras": 5, "max_lora_rank": 32, "gpu_memory_utilization": 0.8}
    queue = {"rps_limit": 100, "tps_limit": 131_072, "max_input_tokens": 32_768}
    model = {"backend": "megatron", "max_loras": 3, "max_length": 32_768, "queue_config": queue}
    model |= placed("model", 4, pp_size=2, dp_size=2)
    model["adapter_config"] = {"adapter_timeout": 120, "adapter_max_lifetime": 36_000}
    sampler = {"sampler_type": "vllm", "engine_args": engine, "queue_config": queue}
    sampler |= placed("sampler", 4, group={"gpus_per_worker": 2}, tp_size=2, dp_size=2)
    return {
        "http_options": {"host": "0.0.0.0", "port": 9000},
        "telemetry": {"enabled": True, "service_name": "twinkle-server", "export_interval_ms": 30_000},
        "persistence": {"mode": "redis", "redis_url": "redis://localhost:6380"},
        "applications": [
            gateway(name),
            application("sampler", name, variables, **sampler),
            application("model", name, variables, **model),
            processor(),
        ],
    }


def mock() -> dict[str, Any]:
    name = "mock-model"
    queue = {"queue_config": QUEUE}
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "persistence": {"mode": "file", "file_path": "/tmp/twinkle_state_mock.json"},
        "applications": [
            gateway(name) | {"args": {"supported_models": [{"model_name": name}]}},
            application("model", name, {}, backend="mock", **queue, **placed("model", 1, "cpu", dp_size=1)),
            application("sampler", name, {}, sampler_type="mock", **queue, **placed("sampler", 1, "cpu", dp_size=1)),
        ],
    }


def megatron_4b() -> dict[str, Any]:
    """A smaller file: state in memory, and a model in two processes."""
    data = megatron()
    text = json.dumps(data).replace("Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-4B").replace("32768", "16000")
    smaller: dict[str, Any] = json.loads(text)
    del smaller["persistence"], smaller["telemetry"]
    _, sampler, model, _ = smaller["applications"]
    sampler["args"] |= placed("sampler", 1, dp_size=1)
    model["args"] |= placed("model", 2, dp_size=2)
    return smaller


def mock_redis() -> dict[str, Any]:
    persistence = {"mode": "redis", "redis_url": "redis://127.0.0.1:6379/0", "key_prefix": "twinkle-test:"}
    return {**mock(), "persistence": persistence}


def e2e_transformers() -> dict[str, Any]:
    data = megatron_4b()
    data["applications"][2]["args"] |= {"backend": "transformers", **placed("model", 2, dp_size=2)}
    return data


def e2e_megatron() -> dict[str, Any]:
    data = megatron_4b()
    data["applications"][2]["args"] |= placed("model", 4, dp_size=2, pp_size=2)
    return data


def e2e_fail_fast() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(
        json.dumps(e2e_megatron()).replace('"TWINKLE_FAIL_FAST": "0"', '"TWINKLE_FAIL_FAST": "1"')
    )
    return data


@pytest.fixture
def load(tmp_path):
    def load(data: dict[str, Any]) -> tuple[ServerConfig, list[str]]:
        path = tmp_path / "server_config.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_config(path)

    return load


PUBLISHED = [transformer, megatron, megatron_4b, mock, mock_redis, e2e_transformers, e2e_megatron, e2e_fail_fast]


@pytest.mark.parametrize("published", PUBLISHED)
def test_the_published_files_are_accepted(load, published) -> None:
    data = published()
    config, notes = load(data)
    mode = data.get("persistence", {}).get("mode")
    if mode is not None:
        became = next(note for note in notes if note.startswith("persistence.mode: became SQLite"))
        assert f"(it was {mode})" in became
        assert ("postgresql://" in became) == (mode == "redis")
        assert config.database_url.startswith("sqlite:")
    assert config.runtime == "ray"
    assert config.generates_key == any(note.startswith("auth.mode: not given; keys") for note in notes)
    assert config.generates_key == (data["http_options"]["host"] == "0.0.0.0")
    assert len(config.served_models) == 1
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("published", PUBLISHED)
def test_check_config_names_the_extra_of_its_hub(tmp_path, capsys, published):
    file = tmp_path / "server_config.yaml"
    file.write_text(yaml.safe_dump(published()))
    assert cli.main(["check-config", "-c", str(file)]) == 0
    assert ("modelscope" in capsys.readouterr().err) == (published not in (mock, mock_redis))


@pytest.mark.parametrize("published", [mock, mock_redis])
def test_the_files_of_the_mock_backend_launch(own_server, published):
    """They launch as they are, but in one process instead of on Ray, and at a free port."""
    config = {**published(), "runtime": "embedded"}
    assert config.pop("http_options")["host"] == "127.0.0.1", "own_server sets the same, with a free port"
    server = own_server(config)
    assert httpx.get(f"{server.url}/api/v1/healthz", trust_env=False).status_code == 200
    assert (server.data_dir / "state.db").exists()


def test_the_file_for_transformers_launches_without_its_vllm_sampler(tmp_path):
    """The rest is as published but for a tiny model on a CPU, in one process instead of on Ray, and a free port."""
    data = json.loads(json.dumps(transformer()).replace("cuda", "cpu").replace("ms://Qwen/Qwen3.5-4B", TINY))
    data["applications"] = [each for each in data["applications"] if each["import_path"] != "sampler"]
    assert [each["import_path"] for each in data["applications"]] == ["server", "model", "processor"]
    server = Server(tmp_path)
    data["http_options"]["port"] = server.port
    server.configure({**data, "runtime": "embedded", "data_dir": str(server.data_dir)})
    try:
        server.start()
        key = (server.data_dir / "generated-key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.get(f"{server.url}/api/v1/twinkle/get_server_capabilities", headers=headers, trust_env=False)
        assert [each["model_name"] for each in answer.json()["supported_models"]] == ["Qwen/Qwen3.5-4B"]
        assert (server.data_dir / "state.db").exists()
        assert server.stop() == 0
    finally:
        server.close()


def test_a_file_for_several_machines_is_refused_at_the_launch(load):
    config, _ = load(mock_redis())
    refuse_a_file_for_several_machines(config.database_url, {"10.0.0.1"})
    with pytest.raises(TwinkleServerError, match=r"2 machines \(10.0.0.1, 10.0.0.2\).*postgresql://"):
        refuse_a_file_for_several_machines(config.database_url, ["10.0.0.2", "10.0.0.1"])
    refuse_a_file_for_several_machines("postgresql://h/d", {"10.0.0.1", "10.0.0.2"})


def test_what_became_of_its_rates(load) -> None:
    config, notes = load({**transformer(), "auth": {"mode": "keys"}})
    assert config.limits.max_training_tokens_per_minute == 6_000_000
    assert config.limits.max_sampling_tokens_per_minute == 6_000_000
    assert config.limits.session_timeout_seconds == 30
    assert any("TWINKLE_FAIL_FAST: has no effect" in note for note in notes)
    assert any("device_mesh: has no effect" in note for note in notes), "of processors"
