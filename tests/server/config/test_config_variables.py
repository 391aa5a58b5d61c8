"""A server's environment variables: those that set a key, and those that have no effect and are reported."""

from pathlib import Path

import pytest

from twinkle.environment import read_server_variables
from twinkle.errors import InvalidInputError
from twinkle.server.config import default_config, load_config
from twinkle.server.config.sources import NO_EFFECT


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(path)

    return load


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setenv("TWINKLE_DEFAULT_SAVE_DIR", "/big/disk")
    monkeypatch.setenv("TWINKLE_PER_USER_PROCESSOR_LIMIT", "7")
    monkeypatch.setenv("TWINKLE_LONG_POLL_TIMEOUT", "120")


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("text", ["", "limits:\nclients:\n"])
def test_variables_stand_for_keys(load, text):
    config, notes = load(text)
    assert config.data_dir == default_config().data_dir == Path("/big/disk")
    assert config.limits.max_processors_per_tenant == 7
    assert config.clients.long_poll_seconds == 25.0, "the longest there is"
    assert notes == [
        "TWINKLE_DEFAULT_SAVE_DIR: became data_dir: /big/disk",
        "TWINKLE_PER_USER_PROCESSOR_LIMIT: became limits.max_processors_per_tenant: 7",
        "TWINKLE_LONG_POLL_TIMEOUT: became clients.long_poll_seconds: 25.0",
    ]


@pytest.mark.usefixtures("three")
def test_the_file_comes_first(load):
    config, notes = load("{data_dir: /d, limits: {max_processors_per_tenant: 3}, clients: {long_poll_seconds: 2}}")
    assert (config.data_dir, config.limits.max_processors_per_tenant) == (Path("/d"), 3)
    assert config.clients.long_poll_seconds == 2.0
    assert notes == [
        "TWINKLE_DEFAULT_SAVE_DIR: has no effect where data_dir is given",
        "TWINKLE_PER_USER_PROCESSOR_LIMIT: has no effect where limits.max_processors_per_tenant is given",
        "TWINKLE_LONG_POLL_TIMEOUT: has no effect where clients.long_poll_seconds is given",
    ]


def test_what_does_nothing_is_named(load, monkeypatch):
    for name in NO_EFFECT:
        monkeypatch.setenv(f"{name}MODE" if name.endswith("_") else name, "0")
    _, notes = load("")
    assert [note.partition(":")[0] for note in notes] == [
        f"{name}MODE" if name.endswith("_") else name for name in NO_EFFECT
    ]
    assert all("has no effect, " in note for note in notes)
    monkeypatch.setenv("TWINKLE_FAIL_FAST", "1")
    monkeypatch.setenv("TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV", "1")
    assert len(load("")[1]) == len(NO_EFFECT) - 2, "what holds anyway needs no word"


def test_variables_of_an_application(load):
    variables = "{TWINKLE_FAIL_FAST: '0', TWINKLE_LONG_POLL_TIMEOUT: '120', TWINKLE_OFFLINE: '1'}"
    deployment = f"{{ray_actor_options: {{runtime_env: {{env_vars: {variables}}}}}}}"
    _, notes = load(f"applications: [{{name: s, import_path: server, deployments: [{deployment}]}}]")
    at = "applications[0].deployments[0].ray_actor_options.runtime_env.env_vars"
    assert notes[1:] == [
        f"{at}.TWINKLE_FAIL_FAST: has no effect, a request that fails is always answered with its error",
        f"{at}.TWINKLE_LONG_POLL_TIMEOUT: has no effect, clients.long_poll_seconds is the key for it",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TWINKLE_PRINT_FORMAT", "toml"),
        ("TWINKLE_PER_USER_PROCESSOR_LIMIT", "0"),
        ("TWINKLE_PER_USER_PROCESSOR_LIMIT", "many"),
        ("TWINKLE_LONG_POLL_TIMEOUT", "-1"),
    ],
)
def test_wrong_values_are_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match=name):
        read_server_variables()


def test_nothing_is_set_by_an_empty_variable(monkeypatch):
    for name in ("SERVER_CONFIG", "RAY_NAMESPACE", "PRINT_FORMAT", "DEFAULT_SAVE_DIR", "LONG_POLL_TIMEOUT"):
        monkeypatch.setenv(f"TWINKLE_{name}", " ")
    found = read_server_variables()
    assert found.print_format == "yaml"
    assert {found.config, found.ray_namespace, found.save_dir, found.long_poll_seconds} == {None}
