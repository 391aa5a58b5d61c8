"""The environment variables and what they may hold."""

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
