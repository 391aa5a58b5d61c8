"""Where our Ray cluster listens, and with which token: environment variables that are set before Ray is imported."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinkle.server.runtime.ray.running import prepare_access

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    for name in (_LOOPBACK, "RAY_AUTH_MODE", "RAY_ADDRESS"):  # set them, so that monkeypatch restores them afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def seen() -> tuple[str | None, str | None]:
    return os.environ.get(_LOOPBACK), os.environ.get("RAY_AUTH_MODE")


@pytest.mark.parametrize("address", [None, "local"])
def test_a_cluster_of_our_own_is_for_this_machine_and_has_a_token(
    home: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    prepare_access(may_start=True)
    assert seen() == ("0", "token")
    token = home / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    prepare_access(may_start=True)
    assert len(list(token.parent.iterdir())) == 1


def test_one_that_is_joined_decides_itself_where_it_listens(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    prepare_access(may_start=True)
    assert seen() == (None, None)
    assert not (home / ".ray").exists()


@pytest.fixture
def started(home: Path) -> Iterator[socket.socket]:
    """The listener of a cluster that `ray start` began, as the file that this leaves says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (home / "ray").mkdir()
        (home / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        yield listener


def test_one_that_ray_start_began_is_joined_with_the_token_that_is_there(home: Path, started: socket.socket) -> None:
    prepare_access(may_start=True)
    assert seen() == (None, None)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("t")
    prepare_access(may_start=True)
    assert seen() == (None, "token")


def test_one_that_was_killed_is_left_out(started: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    started.close()
    prepare_access(may_start=True)
    assert os.environ["RAY_ADDRESS"] == "local"
    assert seen() == ("0", "token")
    assert (
        "ray_current_cluster names a Ray cluster that does not answer; launch starts its own" in capsys.readouterr().err
    )


def test_a_command_that_starts_none_does_not_ask_for_a_new_one(
    started: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    started.close()
    prepare_access(may_start=False)
    assert "RAY_ADDRESS" not in os.environ
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_that_is_named_is_used(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (home / "token").write_text("t")
    monkeypatch.setenv(name, str(home / "token"))
    prepare_access(may_start=True)
    assert seen() == ("0", "token")
    assert not (home / ".ray").exists()


def test_what_the_operator_says_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    prepare_access(may_start=True)
    assert seen() == ("0", "disabled")
    assert not (home / ".ray").exists()


def test_who_only_looks_makes_no_token(home: Path) -> None:
    prepare_access(may_start=False)
    assert seen() == ("0", None)
    assert not (home / ".ray").exists()
