"""Backups of a state on PostgreSQL: pg_dump and pg_restore, and what is refused. SQLite: state/test_backup_files.py.

test_operator_commands.py has the backup of a server at work, on both databases.
"""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.servers.postgres_cluster import cluster_url, execute, new_database
from tests.support.servers.state_samples import accept, begin, checkpoint, on_backend, op, query, url_of, with_store
from twinkle.errors import TwinkleServerError
from twinkle.server.ids import CheckpointPath
from twinkle.server.state import backup_records
from twinkle.server.state.backup import back_up, back_up_records, check_backup, restore, restore_records
from twinkle.server.state.backup_records import PostgresRecords
from twinkle.server.state.files.data_dir import DataDir, write_whole
from twinkle.server.state.store import Store

pytestmark = pytest.mark.skipif(cluster_url() is None, reason="needs PostgreSQL: make test-postgres")

RUN = "s1:train:1"
PATH = CheckpointPath(RUN, "weights", "final")


def fill(data_dir: Path) -> Callable[[Store], object]:
    async def main(store: Store) -> None:
        await begin(store)
        await accept(store, op(0, b"create", RUN))
        directory = DataDir(data_dir).checkpoint(PATH, 1)
        write_whole(directory, lambda part: (part / "adapter").write_bytes(b"weights"))
        await store.checkpoints.add(replace(checkpoint("final", RUN), directory=DataDir(data_dir).relative(directory)))

    return main


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The files of a server with an op in its journal and a checkpoint; its records are at ``url_of(data_dir)``."""
    with on_backend("postgresql"):
        with_store(tmp_path / "data", fill(tmp_path / "data"))
        yield tmp_path / "data"


@pytest.fixture
def backup(data_dir: Path, tmp_path: Path) -> Path:
    with PostgresRecords.opened(url_of(data_dir)) as records:
        back_up_records(data_dir, records, tmp_path / "backup")
    return tmp_path / "backup"


def empty_database() -> str:
    return new_database(cluster_url())


def test_the_records_and_files_come_back(data_dir: Path, backup: Path, tmp_path: Path) -> None:
    assert check_backup(backup) == []
    assert {path.stat().st_mode & 0o077 for path in backup.iterdir()} == {0}
    new, url = tmp_path / "new", empty_database()
    with PostgresRecords.opened(url) as records:
        summary = restore_records(backup, new, records)
    assert summary.files == len([path for path in backup.rglob("*") if path.is_file()]) - 1
    for table in ("sessions", "runs", "ops", "checkpoints", "snapshots", "schema_version"):
        order = f"SELECT * FROM {table} ORDER BY 1"
        assert execute(url, order) == query(data_dir, order), table
    assert execute(url, "SELECT * FROM writers") == []
    assert not list(new.glob("*pgdump*")) + list(new.glob(".pgpass*"))
    (path,) = (path for path in new.rglob("adapter"))
    assert path.read_bytes() == b"weights"


def test_the_records_are_those_of_the_moment_whose_files_are_held(data_dir: Path, tmp_path: Path) -> None:
    """Rows that are written after the moment was chosen are not in the backup."""
    with PostgresRecords.opened(url_of(data_dir)) as records:
        named = records.choose_moment(tmp_path)
        assert len(named.directories) == 1
        execute(url_of(data_dir), "DELETE FROM checkpoints")
        assert records.named_now().directories == frozenset()
        records.write(tmp_path, tmp_path / "dump")
    url = empty_database()
    with PostgresRecords.opened(url) as records:
        (tmp_path / "partial").mkdir()
        (tmp_path / "dump").rename(tmp_path / "partial" / records.file)
        records.put_back(tmp_path / "partial", tmp_path / "new")
    assert execute(url, "SELECT count(*) FROM checkpoints") == [(1,)]


def test_nothing_is_replaced(data_dir: Path, backup: Path, tmp_path: Path) -> None:
    with (
        PostgresRecords.opened(url_of(data_dir)) as records,
        pytest.raises(TwinkleServerError, match="holds the state of a server, which a backup does not replace"),
    ):
        restore_records(backup, tmp_path / "new", records)
    assert not (tmp_path / "new").exists()


def test_a_failed_restore_leaves_nothing(backup: Path, tmp_path: Path) -> None:
    url = empty_database()
    execute(url, "CREATE TABLE runs (other integer)")  # in the way
    with (
        PostgresRecords.opened(url) as records,
        pytest.raises(TwinkleServerError, match=r'pg_restore failed: .*relation "runs" already exists'),
    ):
        restore_records(backup, tmp_path / "new", records)
    assert [path.name for path in tmp_path.iterdir() if "new" in path.name] == []
    assert execute(url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(1,)]


def test_kinds_of_databases_are_not_mixed(backup: Path, tmp_path: Path) -> None:
    with pytest.raises(TwinkleServerError, match=r"has no state\.db: its records were in another kind of database"):
        restore(backup, tmp_path / "new", tmp_path / "new" / "state.db")
    with on_backend("sqlite"):
        with_store(tmp_path / "sqlite", fill(tmp_path / "sqlite"))
    back_up(tmp_path / "sqlite", tmp_path / "sqlite" / "state.db", tmp_path / "other")
    with (
        PostgresRecords.opened(empty_database()) as records,
        pytest.raises(TwinkleServerError, match=r"has no state\.pgdump"),
    ):
        restore_records(tmp_path / "other", tmp_path / "new", records)


def test_what_is_not_there_is_not_backed_up(data_dir: Path, tmp_path: Path) -> None:
    with (
        PostgresRecords.opened(empty_database()) as records,
        pytest.raises(TwinkleServerError, match="no server has kept its state in the database 'twinkle_test_"),
    ):
        back_up_records(data_dir, records, tmp_path / "b")
    with (
        PostgresRecords.opened(url_of(data_dir)) as records,
        pytest.raises(TwinkleServerError, match="does not hold the files of a server that uses the database"),
    ):
        back_up_records(tmp_path / "elsewhere", records, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_no_other_user_sees_the_password(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of processes can be read by everybody on the machine."""
    commands: list[list[str]] = []
    run = subprocess.run

    def watched(command: list[str], **options: object) -> object:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(backup_records.subprocess, "run", watched)
    password = url_of(data_dir).split(":")[2].split("@")[0]
    elsewhere = f"{url_of(data_dir).replace(f':{password}@', '@')}?password={password}"  # libpq accepts this, too
    for number, url in enumerate((url_of(data_dir), elsewhere)):
        with PostgresRecords.opened(url) as records:
            back_up_records(data_dir, records, tmp_path / f"b{number}")
    assert [Path(command[0]).name for command in commands] == ["pg_dump"] * 2
    assert password not in str(commands)
