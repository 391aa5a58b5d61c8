"""The hub's environment variables and their allowed values."""

from pathlib import Path

import pytest

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError


def test_defaults(monkeypatch):
    monkeypatch.delenv("TWINKLE_CACHE_DIR", raising=False)
    monkeypatch.delenv("TWINKLE_OFFLINE", raising=False)
    environment = read_environment()
    assert environment.cache_dir == Path.home() / ".cache" / "twinkle"
    assert environment.offline is False


def test_cache_dir_is_absolute_and_knows_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", "~/models")
    assert read_environment().cache_dir == Path.home() / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", "models")
    assert read_environment().cache_dir == tmp_path / "models"


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("True", True), ("on", True), ("0", False), ("", False)])
def test_offline_switch(monkeypatch, value, offline):
    monkeypatch.setenv("TWINKLE_OFFLINE", value)
    assert read_environment().offline is offline


def test_offline_switch_refuses_what_it_does_not_know(monkeypatch):
    monkeypatch.setenv("TWINKLE_OFFLINE", "maybe")
    with pytest.raises(InvalidInputError, match=r"TWINKLE_OFFLINE: got 'maybe', allowed: 1, true"):
        read_environment()


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("TWINKLE_MODE", "Ray", "mode", "ray"),
        ("TWINKLE_MODE", "", "mode", "local"),
        ("TWINKLE_NAME", "run 7", "name", "run 7"),
        ("TWINKLE_NAME", "", "name", None),
        ("TWINKLE_NOTIFIER", '{"class": "A"}', "notifier", {"class": "A"}),
        ("TWINKLE_FULL_DETERMINISM", "1", "full_determinism", True),
        ("TWINKLE_FAIL_FAST", "", "fail_fast", True),
        ("TWINKLE_FAIL_FAST", "OFF", "fail_fast", False),
        ("TWINKLE_DIST_TIMEOUT_SECONDS", "", "dist_timeout_seconds", 7200.0),
        ("TWINKLE_DIST_TIMEOUT_SECONDS", "30", "dist_timeout_seconds", 30.0),
    ],
)
def test_variables_of_a_run(monkeypatch, name, value, field, expected):
    monkeypatch.setenv(name, value)
    assert getattr(read_environment(), field) == expected


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TWINKLE_MODE", "slurm", "TWINKLE_MODE: got 'slurm', allowed: local or ray"),
        ("TWINKLE_NOTIFIER", "secret", "TWINKLE_NOTIFIER: got 'no JSON'"),
        ("TWINKLE_NOTIFIER", "[1]", "TWINKLE_NOTIFIER: got 'a JSON list'"),
        ("TWINKLE_DIST_TIMEOUT_SECONDS", "0", "TWINKLE_DIST_TIMEOUT_SECONDS: got '0', allowed: a number > 0"),
    ],
)
def test_variables_of_a_run_that_hold_nonsense(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match=text):
        read_environment()
