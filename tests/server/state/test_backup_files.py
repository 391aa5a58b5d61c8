"""The files of a backup: every bit is checked, all are on disk before it counts, and other users cannot read them."""

import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.servers.recorded_disk import Disk
from tests.support.servers.state_samples import accept, begin, checkpoint, op, with_store
from twinkle.errors import TwinkleServerError
from twinkle.server.ids import CheckpointPath
from twinkle.server.state import backup as backup_module
from twinkle.server.state.backup import back_up, restore
from twinkle.server.state.backup_records import PostgresRecords
from twinkle.server.state.data_check import check_data
from twinkle.server.state.files.data_dir import DataDir, write_whole
from twinkle.server.state.store import Store
from twinkle.server.types import Encoding, OpKind, Outcome
from twinkle.utils import progress

RUN = "s1:train:1"
PATH = CheckpointPath(RUN, "weights", "final")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The state of a server with an op in its journal and a checkpoint."""
    data_dir = tmp_path / "data"

    async def fill(store: Store) -> None:
        await begin(store)
        await accept(store, op(0, b"create", RUN))
        await accept(store, op(1, b"body", RUN))
        directory = DataDir(data_dir).checkpoint(PATH, 1)
        write_whole(directory, _write_checkpoint)
        await store.checkpoints.add(replace(checkpoint("final", RUN), directory=DataDir(data_dir).relative(directory)))

    with_store(data_dir, fill)
    return data_dir


def _write_checkpoint(directory: Path) -> None:
    (directory / "part").mkdir()
    (directory / "part" / "adapter").write_bytes(b"weights")


def files_below(directory: Path) -> dict[str, Path]:
    """Return all files below the directory by their relative names."""
    return {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}


def test_a_wrong_bit_in_any_file_is_found_by_name(tmp_path: Path, data_dir: Path) -> None:
    backup, new = tmp_path / "backup", tmp_path / "new"
    back_up(data_dir, data_dir / "state.db", backup)
    files = files_below(backup)
    assert [name for name in files if name.startswith("journal/bodies/")]
    assert [name for name in files if name.startswith("checkpoints/") and name.endswith("part/adapter")]
    for name, file in files.items():
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(TwinkleServerError, match="nothing was restored") as refused:
            restore(backup, new, new / "state.db")
        assert name in str(refused.value)
        assert not new.exists()
        file.write_bytes(content)
    restore(backup, new, new / "state.db")
    for name in files.keys() - {"backup.json"}:
        assert (new / name).read_bytes() == files[name].read_bytes(), name


def test_a_long_backup_says_how_far_it_is(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def waiting_copy(source: Path, target: Path) -> None:
        copy(source, target)
        if source.name == "secret":  # after all other files
            deadline = time.monotonic() + 120
            while "copying files" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)

    copy = backup_module._copy
    monkeypatch.setattr(backup_module, "_copy", waiting_copy)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress, "_PAUSES", ((float("inf"), 0.05),))
    caplog.set_level("INFO")
    back_up(data_dir, data_dir / "state.db", tmp_path / "backup")
    assert f"backup of {data_dir}: copying files, " in caplog.text
    assert " adapters, versions and journal files (" in caplog.text
    assert f"backup of {data_dir}: done after" in caplog.text


def test_a_backup_is_on_disk_before_it_says_so(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backup = tmp_path / "backups" / "today"
    disk = Disk(monkeypatch)
    back_up(data_dir, data_dir / "state.db", backup)
    manifest = backup / "backup.json"
    before = set(disk.flushed(before=True, name=manifest))
    assert {backup, *backup.rglob("*")} - {manifest} <= before
    # Also the path to it: every new directory, and the existing one that contains it.
    assert {backup, backup.parent, tmp_path} <= set(disk.flushed(before=False, name=manifest))


def test_what_is_restored_is_on_disk_before_it_has_its_name(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, new = tmp_path / "backup", tmp_path / "srv" / "new"
    back_up(data_dir, data_dir / "state.db", backup)
    disk = Disk(monkeypatch)
    restore(backup, new, new / "state.db")
    (partial,) = {path for path in disk.flushed(before=True, name=new) if path.name.startswith(".new.restoring-")}
    before = {path.relative_to(partial) for path in disk.flushed(before=True, name=new) if path.is_relative_to(partial)}
    assert {path.relative_to(new) for path in (new, *new.rglob("*"))} <= before
    assert {new.parent, tmp_path} <= set(disk.flushed(before=False, name=new))


def test_a_restored_database_elsewhere_is_on_disk_too(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may be on another disk, where it is written once more."""
    backup, database = tmp_path / "backup", tmp_path / "databases" / "mine.db"
    back_up(data_dir, data_dir / "state.db", backup)
    disk = Disk(monkeypatch)
    restore(backup, tmp_path / "new", database)
    assert {database, database.parent, tmp_path} <= set(disk.flushed(before=False, name=database))


def test_bodies_that_the_server_deleted_are_not_missed(tmp_path: Path) -> None:
    """An answered forward pass never runs again, so neither a backup nor check-data needs its body."""
    data_dir = tmp_path / "data"

    async def fill(store: Store) -> None:
        await begin(store)
        await accept(store, op(0, bytes(900), RUN, OpKind.FORWARD))
        await accept(store, op(1, bytes(900), RUN))
        await store.ops.record_outcomes([(RUN, 0, Outcome(Encoding.JSON, b"{}", False))], now=5.0)
        assert (await store.ops.delete_segments()).body_segments == 1

    with_store(data_dir, fill, segment_bytes=900)
    assert not list(check_data(data_dir, data_dir / "state.db"))
    back_up(data_dir, data_dir / "state.db", tmp_path / "backup")
    assert len(list((tmp_path / "backup" / "journal" / "bodies").iterdir())) == 1


def test_nobody_else_reads_a_backup(tmp_path: Path, data_dir: Path) -> None:
    """Even if its directory existed and was readable by all, and files come from an earlier version of Twinkle."""
    backup = tmp_path / "backup"
    backup.mkdir(mode=0o755)
    (adapter,) = data_dir.rglob("part/adapter")
    adapter.chmod(0o644)
    mask = os.umask(0o022)
    try:
        back_up(data_dir, data_dir / "state.db", backup)
    finally:
        os.umask(mask)
    readable = [path for path in backup.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert readable == []


def test_a_passphrase_is_not_shown_in_the_list_of_processes() -> None:
    url = "postgresql+psycopg://twinkle@127.0.0.1/twinkle?sslkey=client.key&sslpassword=hidden"
    with pytest.raises(TwinkleServerError, match="sslpassword") as refused, PostgresRecords.opened(url):
        pass
    assert "hidden" not in str(refused.value)
