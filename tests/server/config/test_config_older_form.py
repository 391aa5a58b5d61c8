"""The older form loads, with a note about the new name of each key, or is refused with the allowed values."""

import pytest

from twinkle.errors import ConfigError
from twinkle.server.config import LimitsConfig, ServerConfig, load_config

OLDER = """
server_type: tinker
proxy_location: EveryNode
http_options: {host: 127.0.0.1, port: 8000}
telemetry_config: {enabled: false, service_name: twinkle-server}
persistence_config: {mode: file, file_path: /tmp/twinkle_state.json, key_prefix: "x:"}
applications:
  - name: server
    route_prefix: /server
    import_path: server
    args:
      server_config:
        per_token_model_limit: 3
        cleanup_interval: 60
        metrics_update_interval: 15.0
        actor_name: state
      http_options: {host: 127.0.0.1, port: 8000}
      route_prefix: /api/v1
    deployments:
      - {name: TwinkleServer, autoscaling_config: {min_replicas: 1, max_replicas: 1, target_ongoing_requests: 128}}
  - name: models
    route_prefix: /models/Qwen/Qwen2.5-7B-Instruct
    import_path: model
    args:
      use_megatron: false
      model_id: ms://Qwen/Qwen2.5-7B-Instruct
      max_loras: 5
      max_length: 10240
      nproc_per_node: 1
      adapter_config: {per_token_adapter_limit: 30, adapter_timeout: 1200}
      queue_config: {max_input_tokens: 16000, execution_timeout: 0, enabled: true}
      device_group: {name: model, ranks: [0], device_type: cuda}
      device_mesh: {device_type: cuda, mesh: [0], mesh_dim_names: ['dp']}
  - name: samplers
    route_prefix: /samplers/Qwen/Qwen2.5-7B-Instruct
    import_path: sampler
    args:
      model_id: ms://Qwen/Qwen2.5-7B-Instruct
      sampler_type: torch
      adapter_config: {adapter_timeout: 1800}
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(path)

    return load


@pytest.fixture
def problems(load):
    """Return ``{field: allowed values}`` of the error about a text."""

    def problems(text):
        with pytest.raises(ConfigError) as caught:
            load(text)
        return {one.field: one.allowed for one in caught.value.problems}

    return problems


def model(args):
    return f"applications: [{{name: m, import_path: model, args: {{model_id: a/b, {args}}}}}]"


def test_an_older_file(load):
    config, notes = load(OLDER)
    limits = {"max_adapters_per_tenant": 3, "max_tokens_per_request": 10240, "session_timeout_seconds": 1200.0}
    assert config.limits == LimitsConfig(**limits)
    (served,) = config.served_models
    assert served.model.backend == "transformers"
    assert served.names == ("ms://Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    assert config.applications[0].route_prefix == "/api/v1"
    gateway, args, sampler = "applications[0].args", "applications[1].args", "applications[2]"
    adapters, tokens, timeout = (f"limits.{name}: {value:g}" for name, value in limits.items())
    assert [note for note in notes if "modelscope" not in note] == [  # whether it is installed does not matter here
        "telemetry_config: became telemetry",
        "persistence_config: became persistence",
        "server_type: dropped, one server speaks both protocols",
        "runtime: not given, ray is used, as for files with applications but no runtime; embedded is one process",
        "persistence_config.mode: became SQLite (it was file); persistence.url names the file, "
        "data_dir/state.db by default",
        "persistence_config.file_path: dropped, the state is in the SQLite file of persistence.url, "
        "data_dir/state.db by default",
        "persistence_config.key_prefix: dropped, each server has a database of its own",
        "applications[0].route_prefix: became /api/v1 (it was /server)",
        f"{gateway}.server_config.cleanup_interval: dropped, the server looks for expired sessions every 15 s",
        f"{gateway}.server_config.metrics_update_interval: dropped, metrics are collected when they are read",
        f"{gateway}.server_config.actor_name: dropped, the state is not an actor",
        "applications[0].args.http_options: dropped, it repeats what holds anyway",
        "applications[0].args.route_prefix: dropped, it repeats what holds anyway",
        "applications[1].route_prefix: became /api/v1/model/Qwen/Qwen2.5-7B-Instruct "
        "(it was /models/Qwen/Qwen2.5-7B-Instruct)",
        f"{args}.queue_config.execution_timeout: dropped, nothing is stopped while it computes",
        f"{args}.queue_config.enabled: dropped, limits are always checked",
        f"{args}.use_megatron: became backend: transformers",
        f"{sampler}.route_prefix: became /api/v1/sampler/Qwen/Qwen2.5-7B-Instruct "
        "(it was /samplers/Qwen/Qwen2.5-7B-Instruct)",
        f"applications[0].args.server_config.per_token_model_limit: became {adapters}",
        f"{args}.adapter_config.per_token_adapter_limit: became {adapters}, the smallest given (here 30)",
        f"{args}.max_loras: became {adapters}, the smallest given (here 5)",
        f"{args}.queue_config.max_input_tokens: became {tokens}, the smallest given (here 16000)",
        f"{args}.max_length: became {tokens}",
        f"{args}.adapter_config.adapter_timeout: became {timeout}",
        f"{sampler}.args.adapter_config.adapter_timeout: became {timeout}, the smallest given (here 1800)",
        "proxy_location: EveryNode is for a cluster of several machines, but the state is in a SQLite file, which "
        "works on one machine only: several machines need persistence.url: postgresql://… and a data_dir that all of "
        "them share",
    ]


def test_what_was_converted_needs_no_conversion_again(load):
    config, _ = load(OLDER)
    again = ServerConfig.model_validate(config.to_yaml_dict())
    assert again == config


def test_an_empty_args_heading(load):
    config, _ = load("applications:\n  - name: server\n    import_path: server\n    args:\n    deployments:\n")
    assert config.applications[0].deployments == ()


def test_rates_became_tokens_a_minute(load):
    text = model("backend: mock, queue_config: {tps_limit: 1000, window_seconds: 2}")
    sampling = (
        "{name: s, import_path: sampler, args: {model_id: a/b, sampler_type: mock, queue_config: {tps_limit: 5}}}"
    )
    config, notes = load(f"{text[:-1]}, {sampling}]")
    assert config.limits.max_training_tokens_per_minute == 30_000
    assert config.limits.max_sampling_tokens_per_minute == 300
    at = "applications[0].args.queue_config"
    assert f"{at}.tps_limit: became limits.max_training_tokens_per_minute: 30000" in notes
    assert f"{at}.window_seconds: dropped, tps_limit is converted with it to tokens a minute" in notes
    both, _ = load("task_queue: {tps_limit: 16000}")
    assert both.limits == LimitsConfig(max_training_tokens_per_minute=960_000, max_sampling_tokens_per_minute=960_000)
    assert load("task_queue: {tps_limit: 0}")[0] == ServerConfig(), "0 meant no limit"


DEFAULT_QUEUE = (
    "{rps_limit: 100, tps_limit: 16000, window_seconds: 1.0, queue_timeout: 300, execution_timeout: 120, "
    "enabled: true, token_cleanup_multiplier: 10, token_cleanup_interval: 60, max_input_tokens: 16000}"
)


def test_a_queue_with_all_its_defaults(load):
    """As in a configuration that was printed with all defaults."""
    config, notes = load(model(f"backend: mock, queue_config: {DEFAULT_QUEUE}"))
    assert config.limits == LimitsConfig(max_training_tokens_per_minute=960_000, max_tokens_per_request=16_000)
    assert len([note for note in notes if "queue_config" in note]) == 9, "each key is spoken of"


def test_queues_of_others_do_not_limit_training(load):
    sampler = "{name: s, import_path: sampler, args: {model_id: a/b, sampler_type: mock, queue_config: Q}}"
    processor = "{name: p, import_path: processor, args: {queue_config: Q}}"
    text = f"{model('backend: mock')[:-1]}, {sampler}, {processor}]".replace("Q", DEFAULT_QUEUE)
    config, notes = load(text)
    assert config.limits == LimitsConfig(max_sampling_tokens_per_minute=960_000)
    assert "applications[2].args.queue_config.tps_limit: dropped, this application has no queue" in notes


def test_keys_that_are_null_are_not_there(load):
    config, _ = load("persistence: {mode: memory, redis_url: null, file_path: null}")
    assert config == ServerConfig()


def test_the_longest_life_of_an_adapter(load):
    config, notes = load(model("backend: mock, adapter_config: {adapter_timeout: 1800, adapter_max_lifetime: 36000}"))
    assert config.limits == LimitsConfig(adapter_max_lifetime_seconds=36000)
    at = "applications[0].args.adapter_config.adapter_max_lifetime"
    assert f"{at}: became limits.adapter_max_lifetime_seconds: 36000" in notes


def test_further_deployments_are_dropped(load):
    text = "applications: [{name: s, import_path: server, deployments: [{num_replicas: 2}, {num_replicas: 3}]}]"
    config, notes = load(text)
    assert [one.num_replicas for one in config.applications[0].deployments] == [2]
    assert notes[-1].startswith("applications[0].deployments[1:]: dropped")


@pytest.mark.parametrize(
    ("args", "key", "allowed"),
    [
        ("queue_config: {queue_timeout: 3}", "queue_config.queue_timeout", "however long they wait"),
        ("queue_config: {execution_timeout: 3}", "queue_config.execution_timeout", "0, or 120 or more ("),
        ("queue_config: {queue_timeout: long}", "queue_config.queue_timeout", "300 or more ("),
        ("queue_config: {tps_limit: -1}", "queue_config.tps_limit", "a number ≥ 0"),
        ("queue_config: {tps_limit: .inf}", "queue_config.tps_limit", "a number ≥ 0"),
        ("queue_config: {tps_limit: .nan}", "queue_config.tps_limit", "a number ≥ 0"),
        ("queue_config: {tps_limit: true}", "queue_config.tps_limit", "a number ≥ 0"),
        ("queue_config: {tps_limit: 5, window_seconds: 0}", "queue_config.window_seconds", "a number > 0"),
        ("queue_config: {enabled: false}", "queue_config.enabled", "true ("),
        ("queue_config: {enabled: 1}", "queue_config.enabled", "true ("),
        ("queue_config: {max_input_token: 3}", "queue_config.max_input_token", "did you mean max_input_tokens?"),
        ("queue_config: 3", "queue_config", "a section with the keys max_input_tokens"),
        ("adapter_config: {adapter_time: 3}", "adapter_config.adapter_time", "did you mean adapter_timeout?"),
        ("use_megatron: no way", "use_megatron", "true or false, or backend"),
        ("use_megatron: false, backend: mock", "use_megatron", "backend alone, which is mock"),
        ("use_megatron: true, backend: transformers", "use_megatron", "backend alone, which is transformers"),
    ],
)
def test_refused_arguments_of_a_model(problems, args, key, allowed):
    text = model(args if "use_megatron" in args else f"backend: mock, {args}")
    found = problems(text)
    assert list(found) == [f"applications[0].args.{key}"]
    assert allowed in found[f"applications[0].args.{key}"]


@pytest.mark.parametrize(
    ("text", "field", "allowed"),
    [
        ("server_type: both", "server_type", "one server speaks both"),
        ("telemetry: {}\ntelemetry_config: {}", "telemetry_config", "telemetry alone"),
        ("telemetry_config: {enabled: 1}", "telemetry_config.enabled", "true or false"),
        ("persistence_config: {urll: 3}", "persistence_config.urll", "did you mean url?"),
        ("persistence: {mode: etcd}", "persistence.mode", "sqlite:///PATH or postgresql://"),
        (
            "applications: [{name: s, import_path: server, args: {http_options: {port: 1}}}]",
            "applications[0].args.http_options",
            "the top level's http_options alone",
        ),
        (
            "applications: [{name: s, import_path: server, args: {route_prefix: /v1}}]",
            "applications[0].args.route_prefix",
            "/api/v1",
        ),
        (
            "applications: [{name: s, import_path: server, args: {server_config: {cleanup: 1}}}]",
            "applications[0].args.server_config.cleanup",
            "did you mean cleanup_interval?",
        ),
    ],
)
def test_refused_elsewhere(problems, text, field, allowed):
    found = problems(text)
    assert list(found) == [field]
    assert allowed in found[field]


@pytest.mark.parametrize("mode", ["memory", "file"])
def test_persistence_modes_are_sqlite_now(load, mode):
    config, notes = load(f"persistence: {{mode: {mode}}}")
    assert config == ServerConfig()
    assert len(notes) == 1
    assert notes[0].startswith(f"persistence.mode: became SQLite (it was {mode})")


@pytest.mark.parametrize("value", ["0", "'5'", "true", "1.5"])
def test_a_wrong_value_is_reported_under_the_older_key(problems, value):
    found = problems(model(f"backend: mock, max_loras: {value}"))
    assert found.keys() == {"applications[0].args.max_loras"}
    assert found["applications[0].args.max_loras"].startswith("an integer ≥ 1")


def test_a_limit_given_in_both_forms(load, problems):
    text = model("backend: mock, max_length: 100")
    config, _ = load(text + "\nlimits: {max_tokens_per_request: 100}")
    assert config.limits.max_tokens_per_request == 100
    found = problems(text + "\nlimits: {max_tokens_per_request: 200}")
    assert found == {"applications[0].args.max_length": "limits.max_tokens_per_request alone, which is 200"}
