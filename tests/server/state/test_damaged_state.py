"""Damage on disk: what a start repairs, what is lost and for whom, what is refused; and what check-data reports."""

import asyncio
import json
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.state_samples import accept, begin, checkpoint, op, opened, run, session, with_store
from twinkle.errors import CheckpointError, TwinkleServerError
from twinkle.server.cli.command_line import main
from twinkle.server.state.backup import back_up, restore
from twinkle.server.state.data_check import check_data
from twinkle.server.state.errors import DamagedRecordError, DamagedStateError, DatabaseInUseError
from twinkle.server.state.files.data_dir import DataDir, write_whole
from twinkle.server.state.files.file_checksums import check_files
from twinkle.server.state.files.guards import RESERVE_BYTES, give_up_reserve, keep_reserve
from twinkle.server.state.integrity import examination
from twinkle.server.state.integrity.row_checksums import row_checksum
from twinkle.server.state.integrity.sqlite_check import Structure
from twinkle.server.state.store import Store
from twinkle.server.types import SamplingSessionRecord

RUN = "s1:train:1"


def test_rows_have_the_checksums_of_earlier_versions() -> None:
    """Rows on disk keep their checksums: with another algorithm every existing row would seem damaged."""
    assert row_checksum(["s1:train:1", 17, b"\x00x", 1794877773.125, None, False]) == 2823939720
    assert row_checksum((float("nan"), -1e300, memoryview(b"ab"), 'é"\\\n', 2**70)) == 2041472230


async def _fill(store: Store) -> None:
    await begin(store)
    await accept(store, op(0, b"create", RUN))
    await accept(store, op(1, b"body", RUN))
    await store.sessions.create(session("s2", "bob"))
    await store.runs.add(run(1, "s2", "bob"))
    await accept(store, op(0, b"create", "s2:train:1"))


def _change(data_dir: Path, statement: str) -> None:
    """Change a row as a flipped bit would, without updating its checksum."""
    with closing(sqlite3.connect(data_dir / "state.db")) as database:
        database.execute(statement)
        database.commit()


def _states(data_dir: Path) -> dict[str, tuple[str, str | None]]:
    async def read(store: Store) -> dict[str, tuple[str, str | None]]:
        runs = [record for each in ("live", "failed", "parked") for record in await store.runs.in_state(each)]
        return {record.run_id: (record.state, record.note) for record in runs}

    return with_store(data_dir, read)


def test_a_damaged_row_of_an_op_costs_its_run_alone(tmp_path, caplog):
    with_store(tmp_path, _fill)
    _change(tmp_path, f"UPDATE ops SET body_length = body_length + 1 WHERE adapter_id = '{RUN}' AND seq = 1")
    states = _states(tmp_path)
    assert states["s2:train:1"] == ("live", None)
    state, note = states[RUN]
    assert state == "failed"
    assert "damaged" in note
    assert "load one of its checkpoints" in note
    assert f"damaged: run {RUN} (tenant alice)" in caplog.text

    async def found(store: Store) -> list[str]:
        return [damage.subject for damage in await store.damage.list()]

    assert with_store(tmp_path, found) == [f"run {RUN}"]


@pytest.mark.parametrize("column", ["adapter_id", "kind", "digest"])
def test_whose_a_damaged_op_is_can_be_told(tmp_path, column):
    """Even if the damage is in the id by which the op would be found."""
    with_store(tmp_path, _fill)
    _change(tmp_path, f"UPDATE ops SET {column} = 'r1:train:1' WHERE adapter_id = '{RUN}' AND seq = 1")
    states = _states(tmp_path)
    assert (states[RUN][0], states["s2:train:1"][0]) == ("failed", "live")


def test_a_session_and_a_run_are_put_back_from_the_copy(tmp_path, caplog):
    with_store(tmp_path, _fill)  # closing the store makes a copy
    _change(tmp_path, "UPDATE sessions SET tenant_id = 'elice' WHERE session_id = 's1'")
    _change(tmp_path, f"UPDATE runs SET spec = 'x' WHERE run_id = '{RUN}'")

    async def check(store: Store) -> None:
        assert (await store.sessions.get("s1")).tenant_id == "alice"
        assert (await store.sessions.get("s1")).state == "active"
        assert await store.runs.get(RUN) == run(1)

    with_store(tmp_path, check)
    assert "put back from the copy" in caplog.text


def test_without_a_copy_a_session_is_ended_and_its_owner_taken_from_its_runs(tmp_path):
    with_store(tmp_path, _fill)
    (tmp_path / "copies" / "state.db").unlink()
    _change(tmp_path, "UPDATE sessions SET tenant_id = 'elice' WHERE session_id = 's1'")

    async def check(store: Store) -> None:
        record = await store.sessions.get("s1")
        assert (record.tenant_id, record.state) == ("alice", "expired")
        assert [each.run_id for each in await store.runs.left_behind()] == [RUN]  # the next maintenance evicts it

    with_store(tmp_path, check)


def test_without_a_copy_a_run_is_failed_under_its_sessions_tenant(tmp_path):
    with_store(tmp_path, _fill)
    (tmp_path / "copies" / "state.db").unlink()
    _change(tmp_path, f"UPDATE runs SET tenant_id = 'bob', spec = '{{' WHERE run_id = '{RUN}'")

    async def check(store: Store) -> None:
        record = await store.runs.get(RUN)
        assert (record.tenant_id, record.state) == ("alice", "failed")
        assert "damaged" in record.note

    with_store(tmp_path, check)


def test_a_damaged_sampling_session_says_so_to_whoever_asks_for_it(tmp_path):
    async def fill(store: Store) -> None:
        await begin(store)
        record = SamplingSessionRecord("s1:sample:0", "s1", 0, "alice", "m", "m", None, None, None, 1.0)
        await store.sampling_sessions.create(record)

    with_store(tmp_path, fill)
    (tmp_path / "copies" / "state.db").unlink()
    _change(tmp_path, "UPDATE sampling_sessions SET model_name = 'x'")

    async def check(store: Store) -> None:
        with pytest.raises(DamagedRecordError, match="damaged"):
            await store.sampling_sessions.get("s1:sample:0")
        assert await store.sampling_sessions.get("s1:sample:1") is None

    with_store(tmp_path, check)


def test_the_record_of_a_checkpoint_is_made_again_from_its_files(tmp_path):
    directory = tmp_path / "checkpoints" / "s1-train-1" / "weights" / "final" / "7"

    async def fill(store: Store) -> None:
        await begin(store)
        write_whole(directory, lambda place: (place / "adapter").write_bytes(b"weights") and None)
        await store.checkpoints.add(replace(checkpoint("final", RUN), directory=DataDir(tmp_path).relative(directory)))

    with_store(tmp_path, fill)
    (tmp_path / "copies" / "state.db").unlink()
    _change(tmp_path, "UPDATE checkpoints SET tenant_id = 'bob', public = 1, name = 'finam'")

    async def check(store: Store) -> None:
        record = await store.checkpoints.get(RUN, "weights", "final")
        assert (record.tenant_id, record.public, record.size_bytes) == ("alice", False, 7)

    with_store(tmp_path, check)


def test_an_update_does_not_hide_damage(tmp_path):
    with_store(tmp_path, _fill)

    async def touch(store: Store) -> None:
        _change(tmp_path, "UPDATE sessions SET display_name = 'x' WHERE session_id = 's1'")  # while the server runs
        await store.sessions.touch({"s1": 1e9, "s2": 1e9})

    with_store(tmp_path, touch)
    with closing(sqlite3.connect(tmp_path / "state.db")) as database:
        assert database.execute("SELECT last_seen FROM sessions").fetchall() == [(1e9,), (1e9,)]
    found = [finding.what for finding in check_data(tmp_path, tmp_path / "state.db")]
    assert len(found) == 1
    assert "sessions" in found[0]
    assert "s1" in found[0]


def test_a_damaged_index_is_made_again(tmp_path, caplog):
    with_store(tmp_path, _fill)
    with closing(sqlite3.connect(tmp_path / "state.db")) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sessions_by_tenant'").fetchone()
        database.execute("PRAGMA journal_mode=DELETE")
    content = bytearray((tmp_path / "state.db").read_bytes())
    place = content.index(b"alice", (root - 1) * 4096, root * 4096)
    content[place] ^= 1
    (tmp_path / "state.db").write_bytes(content)
    assert set(_states(tmp_path)) == {RUN, "s2:train:1"}
    assert "nothing is lost" in caplog.text

    async def listed(store: Store) -> int:
        return (await store.sessions.list("alice", 10)).total

    assert with_store(tmp_path, listed) == 1


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "header", "schema"])
def test_a_database_that_cannot_be_used_is_refused_by_name_and_repaired_by_command(tmp_path, how, capsys):
    with_store(tmp_path, _fill)
    file = tmp_path / "state.db"
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "schema":
        content[content.index(b"display_name")] ^= 1
        file.write_bytes(content)
    else:
        content[20 if how == "header" else 0] ^= 4
        file.write_bytes({"empty": b"", "cut": content[:5000], "header": bytes(content)}[how])
    for lock in (True, False) if how in ("missing", "empty") else (True,):
        with pytest.raises(DamagedStateError, match=r"state\.db .*twinkle-server check-data"):
            asyncio.run(Store.open(tmp_path, lock=lock))
    assert main(["check-data", "--data-dir", str(tmp_path)]) == 1
    assert str(file) in capsys.readouterr().out
    assert main(["check-data", "--repair", "--data-dir", str(tmp_path)]) == 0
    assert "what was recorded later is lost" in capsys.readouterr().err
    assert set(_states(tmp_path)) == {RUN, "s2:train:1"}


def test_the_error_says_what_a_repair_has_changed(tmp_path, monkeypatch):
    """A repair that did not mend the database has changed rows, and the error must not deny it."""
    with_store(tmp_path, _fill)
    structures = [Structure(None, indexes=True), Structure("page 3 is wrong", indexes=False)]
    monkeypatch.setattr(examination, "check_structure", lambda _connection: structures.pop(0))
    with pytest.raises(DamagedStateError, match=r"page 3 is wrong\. 0 damaged rows were repaired or removed") as error:
        examination.examine(tmp_path / "state.db", tmp_path)
    assert "Nothing was changed" not in str(error.value)


def test_a_lost_secret_does_not_cost_the_database(tmp_path, capsys):
    with_store(tmp_path, _fill)
    for file in (tmp_path / "secret", tmp_path / "copies" / "secret"):
        file.write_text("damaged")
    before = (tmp_path / "state.db").read_bytes()
    assert main(["check-data", "--repair", "--data-dir", str(tmp_path)]) == 1
    assert "secret" in capsys.readouterr().out
    assert (tmp_path / "state.db").read_bytes() == before
    assert not list(tmp_path.glob("state.db.damaged-*"))


def test_flipped_bits_of_a_database_cost_a_row_or_are_refused(tmp_path):
    """A small part of ``make damage``, without servers: the content of a row never prevents a start."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    with_store(original, _fill)
    content = (original / "state.db").read_bytes()
    in_rows = set()
    with closing(sqlite3.connect(original / "state.db")) as database:
        for text in ("alice", "s2:train:1", "session_create"):
            assert text.encode() in content
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in database.execute(f"SELECT * FROM {table}"):
                for value in (each.encode() for each in row if isinstance(each, str) and len(each) >= 8):
                    places = [place for place in range(len(content)) if content.startswith(value, place)]
                    in_rows.update(place + number for place in places for number in range(len(value)))
        # Texts of rows may also stand in the definitions of tables, whose damage does prevent a start.
        for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"):
            text = sql.encode()
            places = [place for place in range(len(content)) if content.startswith(text, place)]
            in_rows.difference_update(place + number for place in places for number in range(len(text)))
    chance = random.Random(18)
    used = [place for place, byte in enumerate(content) if byte]
    for place in (*chance.sample(sorted(in_rows), 15), *chance.sample(used, 30)):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        (copy / "state.db").write_bytes(damaged)
        try:
            with_store(copy, lambda store: store.damage.list())
        except DamagedStateError:
            assert place not in in_rows, place


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.servers.state_samples import accept, begin, op
from twinkle.server.state.store import Store

async def main():
    store = await Store.open(Path(sys.argv[1]))
    await begin(store)
    for seq in range(30):
        await accept(store, op(seq, b"body", "s1:train:1"))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A data directory whose server was killed: most of its records are in the WAL."""
    data_dir = tmp_path_factory.mktemp("killed") / "data"
    command = [sys.executable, "-c", KILLED, str(data_dir), str(ROOT)]
    assert subprocess.run(command, check=False).returncode == -9
    return data_dir


@pytest.mark.parametrize("how", ["flip", "cut", "deleted"])
def test_a_damaged_wal_is_refused_by_name(tmp_path, killed, how, capsys):
    data_dir = tmp_path / "data"
    shutil.copytree(killed, data_dir)
    wal = data_dir / "state.db-wal"
    content = bytearray(wal.read_bytes())
    if how == "deleted":
        wal.unlink()
    elif how == "cut":
        os.truncate(wal, len(content) - 10_000)
    else:
        content[len(content) // 2] ^= 1
        wal.write_bytes(content)
    for lock in (True, False):
        with pytest.raises(DamagedStateError, match=r"state\.db-wal is damaged.*twinkle-server check-data"):
            asyncio.run(Store.open(data_dir, lock=lock))
    with pytest.raises(DamagedStateError):
        back_up(data_dir, data_dir / "state.db", tmp_path / "backup")
    if how != "deleted":
        assert main(["check-data", "--repair", "--data-dir", str(data_dir)]) in (0, 1)
        assert "lost" in capsys.readouterr().err
        with_store(data_dir, lambda store: store.sessions.get("s1"))


def test_a_whole_wal_is_not(tmp_path, killed):
    data_dir = tmp_path / "data"
    shutil.copytree(killed, data_dir)

    async def count(store: Store) -> int:
        return len(await store.ops.times(RUN))

    assert with_store(data_dir, count) == 30


def test_the_machine_went_down_since(tmp_path, killed, caplog):
    """Frames that were not synced may then be missing, as documented."""
    data_dir = tmp_path / "data"
    shutil.copytree(killed, data_dir)
    os.truncate(data_dir / "state.db-wal", (data_dir / "state.db-wal").stat().st_size - 10_000)
    (data_dir / "copies" / "boot").write_text("another boot")
    with_store(data_dir, lambda store: store.sessions.get("s1"))
    assert "The machine went down since" in caplog.text


def test_check_data_finds_files_and_whose_they_are(tmp_path, capsys):
    directory = tmp_path / "checkpoints" / "s1-train-1" / "weights" / "final" / "7"

    async def fill(store: Store) -> None:
        await _fill(store)
        write_whole(directory, lambda place: (place / "adapter").write_bytes(b"weights") and None)
        await store.checkpoints.add(replace(checkpoint("final", RUN), directory=DataDir(tmp_path).relative(directory)))

    with_store(tmp_path, fill)
    assert main(["check-data", "--data-dir", str(tmp_path)]) == 0
    assert "nothing is damaged" in capsys.readouterr().out
    (directory / "adapter").write_bytes(b"weightt")
    segment = next((tmp_path / "journal" / "bodies").iterdir())
    content = bytearray(segment.read_bytes())
    content[content.index(b"body")] ^= 1
    segment.write_bytes(content)
    (tmp_path / "secret").write_bytes(b"")
    assert main(["check-data", "--data-dir", str(tmp_path), "--format", "json"]) == 1
    found = {(each["tenant_id"], each["run_id"]): each["what"] for each in json.loads(capsys.readouterr().out)}
    assert len(found) == 2
    assert "secret" in found[None, None]

    async def beside_a_server() -> None:
        async with opened(tmp_path):
            assert await asyncio.to_thread(main, ["check-data", "--data-dir", str(tmp_path)]) == 1

    asyncio.run(beside_a_server())
    assert "in use" in capsys.readouterr().err


def test_files_are_private_in_a_directory_that_somebody_else_made(tmp_path):
    tmp_path.chmod(0o755)
    directory = tmp_path / "snapshots" / "run" / "7"
    write_whole(directory, lambda place: (place / "weights").write_bytes(b"w") and None)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}
    assert modes == {"7": 0o700, "weights": 0o600, "checksums.json": 0o600}
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    check_files(directory)
    (directory / "weights").write_bytes(b"v")
    with pytest.raises(CheckpointError, match="weights"):
        check_files(directory)


def test_two_servers_do_not_share_a_database_file(tmp_path):
    url = f"sqlite:///{tmp_path}/shared/state.db"

    async def both() -> None:
        store = await Store.open(tmp_path / "one", url)
        with pytest.raises(DatabaseInUseError, match="in use by another server"):
            await Store.open(tmp_path / "two", url)
        await store.close()
        await (await Store.open(tmp_path / "two", url)).close()

    asyncio.run(both())


def test_a_backup_with_a_wrong_bit_is_not_restored(tmp_path, capsys):
    data_dir, backup = tmp_path / "data", tmp_path / "backup"
    with_store(data_dir, _fill)
    back_up(data_dir, data_dir / "state.db", backup)
    left = tmp_path / ".new.restoring-999999999"  # left by a killed restore
    left.mkdir()
    for name in ("secret", "backup.json", "state.db"):
        content = (backup / name).read_bytes()
        (backup / name).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        with pytest.raises(TwinkleServerError, match=name.replace(".", r"\.")):
            restore(backup, tmp_path / "new", tmp_path / "new" / "state.db")
        (backup / name).write_bytes(content)
    assert main(["check-data", "--backup", str(backup)]) == 0
    (backup / "secret").write_bytes(b"x")
    assert main(["check-data", "--backup", str(backup)]) == 1
    assert "secret" in capsys.readouterr().out
    (backup / "secret").write_bytes((data_dir / "secret").read_bytes())
    restore(backup, tmp_path / "new", tmp_path / "new" / "state.db")
    assert not left.exists()
    assert set(_states(tmp_path / "new")) == {RUN, "s2:train:1"}


def test_space_is_held_in_reserve_and_given_up(tmp_path, monkeypatch):
    with_store(tmp_path, _fill)
    keep_reserve(tmp_path)
    reserve = tmp_path / "reserve"
    assert reserve.stat().st_size == RESERVE_BYTES
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    assert not give_up_reserve(tmp_path, only_if_low=True)
    with_store(tmp_path, lambda store: store.sessions.get("s1"))
    assert reserve.exists()
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with_store(tmp_path, lambda store: store.sessions.get("s1"))
    assert not reserve.exists()
    keep_reserve(tmp_path)
    assert not reserve.exists()
