"""Opening a data directory: modes, the lock, schema versions, and what a SIGKILL leaves behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Connection, make_url

from tests.support.paths import ROOT
from tests.support.servers.state_samples import begin, opened, query, run, url_of, with_store
from twinkle.errors import UnsupportedError
from twinkle.server.state.database.driver import Role
from twinkle.server.state.database.migrations import MIGRATIONS, migrate
from twinkle.server.state.database.sqlite import SqliteDriver, default_url
from twinkle.server.state.errors import DataDirInUseError, SchemaVersionError
from twinkle.server.state.store import Store, driver_of

VERSION = 1 + len(MIGRATIONS)

pytestmark = pytest.mark.usefixtures("backend")
on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)


def test_everything_is_private(tmp_path, backend):
    data_dir = tmp_path / "new" / "data"

    async def check(store: Store):
        await begin(store)
        modes = {
            str(path.relative_to(data_dir)): stat.S_IMODE(path.stat().st_mode)
            for path in (data_dir, *data_dir.rglob("*"))
        }
        directories = {".", "copies", "journal", "journal/bodies", "journal/outcomes"}
        database = {"state.db", "state.db-wal", "state.db-shm"} if backend == "sqlite" else set()
        copies = {"copies/secret"}
        if backend == "sqlite":
            copies |= {"copies/boot", "copies/database", "copies/state.db"}
        assert modes.keys() == directories | database | copies | {"secret", "lock"}
        assert {modes[name] for name in modes.keys() & directories} == {0o700}
        assert {modes[name] for name in modes.keys() - directories} == {0o600}

    with_store(data_dir, check)


@on_sqlite
def test_sqlite_is_set_up_as_documented(tmp_path):
    engine = SqliteDriver(default_url(tmp_path)).engine
    with engine.connect() as connection:
        for pragma, value in {
            "journal_mode": "wal",
            "synchronous": 1,
            "foreign_keys": 1,
            "busy_timeout": 10_000,
        }.items():
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value
    engine.dispose()


def test_a_second_server_is_refused_and_the_next_one_is_not(tmp_path):
    async def main():
        async with opened(tmp_path):
            with pytest.raises(DataDirInUseError, match=str(tmp_path)):
                await Store.open(tmp_path, url_of(tmp_path))
            async with opened(tmp_path, lock=False):
                pass
            with pytest.raises(DataDirInUseError):
                await Store.open(tmp_path, url_of(tmp_path))
        async with opened(tmp_path):
            pass

    asyncio.run(main())


def test_a_second_process_is_refused(tmp_path):
    program = """
import asyncio, sys
from pathlib import Path
from twinkle.server.state.errors import DataDirInUseError
from twinkle.server.state.store import Store
try:
    asyncio.run(Store.open(Path(sys.argv[1]), sys.argv[2] or None))
except DataDirInUseError:
    sys.exit(7)
"""

    async def check(store: Store):
        del store
        command = [sys.executable, "-c", program, str(tmp_path), url_of(tmp_path) or ""]
        done = await asyncio.to_thread(subprocess.run, command, check=False)
        assert done.returncode == 7

    with_store(tmp_path, check)


@on_sqlite
def test_a_database_can_be_elsewhere_and_must_be_a_file_or_postgresql(tmp_path):
    async def main():
        store = await Store.open(tmp_path / "data", f"sqlite+aiosqlite:///{tmp_path}/other.db")
        await begin(store)
        await store.close()
        assert (tmp_path / "other.db").exists()
        assert not (tmp_path / "data" / "state.db").exists()
        for url in ("mysql://me:hush@host/db", "sqlite://", "sqlite:///:memory:", "state.db"):
            with pytest.raises(UnsupportedError, match="database url") as caught:
                await Store.open(tmp_path / "data", url)
            assert "hush" not in str(caught.value)

    asyncio.run(main())


def migrated(data_dir: Path, *more) -> None:
    """Open the database like a Twinkle version that knows more migrations."""
    url = url_of(data_dir)
    driver = SqliteDriver(default_url(data_dir)) if url is None else driver_of(make_url(url), Role.SERVER)
    with driver.connect() as connection:
        driver.begin_migration(connection)
        migrate(connection, [*MIGRATIONS, *more])
        driver.finish_migration(connection)
    driver.engine.dispose()


def add_color(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN color TEXT NOT NULL DEFAULT 'blue'")


def paint(connection: Connection) -> None:
    connection.exec_driver_sql("UPDATE runs SET color = 'red'")


def fail(connection: Connection) -> None:
    connection.exec_driver_sql("DELETE FROM runs")
    raise ArithmeticError


def test_an_older_database_is_migrated_step_by_step_and_keeps_its_data(tmp_path):
    with_store(tmp_path, begin)
    migrated(tmp_path, add_color)
    assert query(tmp_path, "SELECT run_id, color FROM runs") == [("s1:train:1", "blue")]
    migrated(tmp_path, add_color, paint)
    assert query(tmp_path, "SELECT run_id, color FROM runs") == [("s1:train:1", "red")]
    assert query(tmp_path, "SELECT version FROM schema_version") == [(VERSION + 2,)]


TABLES = {
    "sqlite": "SELECT m.name, c.name, c.type, c.pk FROM sqlite_master m JOIN pragma_table_info(m.name) c ORDER BY 1, 2",
    "postgresql": """
        SELECT c.table_name, c.column_name, c.data_type, c.is_nullable, k.ordinal_position
        FROM information_schema.columns c LEFT JOIN information_schema.key_column_usage k
        USING (table_schema, table_name, column_name) WHERE c.table_schema = 'public' ORDER BY 1, 2, 5
    """,
}


def test_version_1_gets_the_tables_of_a_new_database(tmp_path, backend):
    tables = TABLES[backend]
    with_store(tmp_path, begin)
    new = query(tmp_path, tables)
    query(tmp_path, "ALTER TABLE runs DROP COLUMN replica")
    query(tmp_path, "ALTER TABLE sampling_sessions DROP COLUMN replica")
    for table in (
        "damage",
        "sampling_clients",
        "leases",
        "run_metrics",
        "run_metric_names",
        "custom_losses",
        "usage",
        "operator_requests",
        "tenants",
    ):
        query(tmp_path, f"DROP TABLE {table}")
    for index in ("sampling_sessions_by_size", "sessions_by_state_of_tenant"):
        query(tmp_path, f"DROP INDEX {index}")
    query(tmp_path, "ALTER TABLE sampling_sessions DROP COLUMN size_bytes")
    for change in (
        "DROP TABLE audit",
        "ALTER TABLE sessions DROP COLUMN finish_reason",
        "ALTER TABLE sessions DROP COLUMN finish_detail",
        "ALTER TABLE ops DROP COLUMN ending",
    ):
        query(tmp_path, change)
    for table in ("sessions", "runs", "checkpoints", "sampling_sessions", "ops", "snapshots", "api_keys"):
        query(tmp_path, f"ALTER TABLE {table} DROP COLUMN checksum")
    query(tmp_path, "UPDATE schema_version SET version = 1")
    if backend == "sqlite":
        query(tmp_path, "PRAGMA user_version = 0")  # which records the form of the tables since version 8

    async def check(store: Store):
        assert await store.runs.get("s1:train:1") == run(1)

    with_store(tmp_path, check)
    assert query(tmp_path, tables) == new


def test_a_migration_that_fails_changes_nothing(tmp_path):
    with_store(tmp_path, begin)
    with pytest.raises(ArithmeticError):
        migrated(tmp_path, add_color, fail)
    assert query(tmp_path, "SELECT version FROM schema_version") == [(VERSION,)]

    async def check(store: Store):
        assert await store.runs.get("s1:train:1") == run(1)

    with_store(tmp_path, check)


@pytest.mark.parametrize("lock", [True, False])
def test_a_newer_database_is_refused_and_left_alone(tmp_path, lock):
    with_store(tmp_path, begin)
    migrated(tmp_path, add_color)
    with pytest.raises(SchemaVersionError, match=f"version {VERSION + 1}, .* up to {VERSION}"):
        asyncio.run(Store.open(tmp_path, url_of(tmp_path), lock=lock))
    assert query(tmp_path, "SELECT version FROM schema_version") == [(VERSION + 1,)]


def test_a_tool_creates_the_database_only_when_no_server_is_about_to(tmp_path):
    async def main():
        async with opened(tmp_path, lock=False) as tool:
            await begin(tool)
        async with opened(tmp_path) as server:
            assert await server.runs.get("s1:train:1") == run(1)
            with pytest.raises(DataDirInUseError):
                await Store.open(tmp_path, f"sqlite:///{tmp_path}/outdated.db", lock=False)

    asyncio.run(main())


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.servers.state_samples import accept, begin, op
from twinkle.server.state.store import Store
from twinkle.server.types import Encoding, Outcome

def body(adapter, seq):
    return f"{adapter}/{seq} ".encode() * (1 + seq * 37 % 2000)

async def client(store, number):
    adapter, seq = f"s1:train:{number}", 0
    while True:
        seq += 1
        await accept(store, op(seq, body(adapter, seq), adapter))
        print("accepted", adapter, seq, flush=True)
        await store.ops.record_outcomes([(adapter, seq, Outcome(Encoding.JSON, body(adapter, seq)))], 1.0)
        print("finished", adapter, seq, flush=True)

async def main():
    store = await Store.open(Path(sys.argv[1]), sys.argv[3] or None, segment_bytes=1_000_000)
    await begin(store, *range(8))
    await asyncio.gather(*(client(store, number) for number in range(8)))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [5, 333, 1500])
def test_everything_acknowledged_survives_sigkill(tmp_path, lines):
    data_dir = tmp_path / "data"
    command = [sys.executable, "-c", KILLED, str(data_dir), str(ROOT), url_of(data_dir) or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        printed = [process.stdout.readline() for _ in range(lines)]
        os.kill(process.pid, signal.SIGKILL)
        printed += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    # The kill may also have cut off the last line.
    acknowledged = [line.split() for line in printed if line.endswith("\n")]
    assert len(acknowledged) >= lines
    last = max(Path(data_dir / "journal" / "bodies").iterdir())
    with last.open("ab") as file:
        file.write(b"TWJ1 torn")

    def body(adapter: str, seq: int) -> bytes:
        return f"{adapter}/{seq} ".encode() * (1 + seq * 37 % 2000)

    async def check(store: Store):
        for word, adapter, seq in acknowledged:
            record = await store.ops.get(adapter, int(seq))
            assert record is not None, (word, adapter, seq)
            assert word == "accepted" or record.outcome is not None, (word, adapter, seq)
        for number in range(8):
            adapter = f"s1:train:{number}"
            for record in await store.ops.since(adapter, 0):  # ops that were not acknowledged are complete too
                assert await store.ops.body(record) == body(adapter, record.seq)
                if record.outcome is not None:
                    assert (await store.ops.outcome(adapter, record.seq)).body == body(adapter, record.seq)

    with_store(data_dir, check)
