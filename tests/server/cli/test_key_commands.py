"""Keys of named tenants: a name belongs to one tenant, and every command says whose key it is about."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from twinkle.server.cli import command_line

Keys = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    """Runs ``twinkle-server keys`` in this process, always on the same data directory."""

    def run(*arguments: str) -> CompletedProcess[str]:
        code = command_line.main(["keys", *arguments, "--data-dir", str(tmp_path / "data")])
        return CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def test_a_second_key_of_a_name_is_of_the_same_tenant(keys: Keys) -> None:
    first, second = (keys("create", "--name", "alice") for _ in range(2))
    assert first.stdout != second.stdout
    assert "a key of the tenant alice (tenant-" in first.stderr
    assert "a further key of the existing tenant alice (tenant-" in second.stderr
    assert "which has 1 other key;" in second.stderr
    made = json.loads(keys("create", "--tenant", "alice", "--name", "laptop", "--json").stdout)
    assert (made["tenant"], made["name"], made["other_keys"]) == ("alice", "laptop", 2)
    keys("create", "--name", "bob")
    rows = json.loads(keys("list", "--json").stdout)
    assert [row["tenant"] for row in rows] == ["alice", "alice", "alice", "bob"]
    assert len({row["tenant_id"] for row in rows}) == 2
    assert keys("create", "--tenant", "bob", "--name", "alice").returncode == 1
    table = keys("list", "--tenant", "bob").stdout.splitlines()
    assert table[0].split() == ["key", "name", "tenant", "state", "created", "tenant", "id"]
    assert len(table) == 2


def test_keys_are_revoked_by_id_by_name_and_by_tenant(keys: Keys) -> None:
    for arguments in (("--name", "alice"), ("--tenant", "alice", "--name", "laptop"), ("--name", "bob")):
        assert keys("create", *arguments).returncode == 0
    several = keys("revoke", "alice")
    assert several.returncode == 1
    assert "one of the 2 active keys: key-" in several.stderr
    assert keys("revoke", "laptop").stdout.startswith("revoked key-")
    assert "of tenant bob (tenant-" in keys("revoke", "bob").stdout
    assert len(json.loads(keys("revoke", "--tenant", "alice", "--json").stdout)) == 1
    assert {row["state"] for row in json.loads(keys("list", "--json").stdout)} == {"revoked"}
    nothing = keys("revoke", "--tenant", "alice")
    assert nothing.returncode == 1
    assert "tenant alice (tenant-" in nothing.stderr
    again = keys("create", "--name", "alice")
    assert "which has 2 other keys (2 revoked);" in again.stderr
