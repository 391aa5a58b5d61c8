"""``clear persistence`` deletes unfinished work; keys, checkpoints, usage and the audit log stay."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers.running import Server, Tenant, mock_config
from twinkle.server.cli import command_line as cli
from twinkle.server.state.database import tables
from twinkle.server.state.records import retention


@pytest.fixture
def clear(capsys) -> Callable[..., tuple[int, str]]:
    def clear(server: Server, *arguments: str) -> tuple[int, str]:
        code = cli.main(["clear", "persistence", "-c", str(server.directory / "config.yaml"), *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return clear


def test_a_server_begins_again(own_server: Callable[..., Server], clear, capsys) -> None:
    server = own_server(mock_config(auth={"mode": "keys"}))
    assert cli.main(["keys", "create", "-c", str(server.directory / "config.yaml")]) == 0
    tenant = Tenant(server.url, capsys.readouterr().out.strip())
    session = tenant.session()
    kept, lost = tenant.model(session), tenant.model(session, number=1)
    pending = tenant.forward_backward(kept, 1)
    tenant.loss(pending)
    path = tenant.json(tenant.save(kept, 2, "first"))["path"]
    tenant.publish(kept, 3)
    code, said = clear(server, "--yes")
    assert code == 1, "it runs"
    assert "in use" in said
    assert server.stop() == 0
    code, said = clear(server, "--yes")
    assert code == 0, said
    assert said.startswith("cleared ")
    assert not list(server.data_dir.glob("snapshots/*")) + list(server.data_dir.glob("samplers/*"))
    server.start()
    assert tenant.get(f"training_runs/{lost}").status_code == 404
    assert tenant.poll(pending).status_code == 404
    assert "cleared the server's state" in tenant.error(tenant.optim_step(kept, 4))
    listed = tenant.get(f"training_runs/{kept}/checkpoints").json()["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["weights/first"]
    fresh = tenant.model()
    tenant.json(tenant.load(fresh, 1, path))
    tenant.loss(tenant.forward_backward(fresh, 2))


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("YES\n", 0), ("\n", 1), ("no\n", 1), ("", 1)])
def test_it_asks_first(tmp_path: Path, clear, monkeypatch, answer: str, code: int) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    found, said = clear(Server(tmp_path))
    assert found == code, said
    assert "[y/N]" in said
    assert ("cleared 0 records" in said) == (code == 0)
    assert ("nothing was cleared" in said) == (code == 1)


def test_every_table_is_cleared_or_kept() -> None:
    """A new table needs a decision."""
    cleared = {statement.table for statement in retention._CLEARED}
    kept = {tables.API_KEYS, tables.AUDIT, tables.CHECKPOINTS, tables.SCHEMA_VERSION, tables.TENANTS, tables.USAGE}
    assert cleared | kept == set(tables.METADATA.tables.values())
    assert not cleared & kept
