"""Backup of a server's state while the server runs, and restore of a backup into a new data directory.

A backup is consistent: its records are those of one moment, and it holds the files that a server needs to go on from
them, complete. Bodies of ops that are not replayed are left out, and sampler versions of sessions that have ended are
copied only as far as their files still exist. This is how a backup is made:

1. The moment of the backup is chosen. The database keeps its records as they are then, also while other connections
   write (``backup_records``).
2. The files that these records name never change once they exist, but the server may delete them meanwhile. It deletes
   files only after their record is gone (a checkpoint: expired; a sampler version: its session has ended). So the files
   are hard-linked into a staging directory, which is fast.
3. If the live records still name all of the linked directories, none of them was being deleted while it was linked
   (except perhaps an expired checkpoint, which nobody can use). Otherwise the steps are repeated with a later
   moment, at most 50 times.
4. Only then are the bytes copied, and the records written. The last segment of the journal may grow during that; no
   record of the backup points to the bytes that were added.

The manifest holds a checksum of every other file and one of itself. A backup with a single wrong bit is not restored,
unless it is of format 1, which had no checksums: of these only the number and total size of the files are compared.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from twinkle.errors import TwinkleServerError
from twinkle.server.state.backup_records import NamedFiles, Records, SqliteRecords
from twinkle.server.state.files.data_dir import make_parents, restrict, sync, sync_all
from twinkle.server.state.files.file_checksums import sums_of
from twinkle.server.state.integrity.copies import write_private
from twinkle.utils.progress import Progress

_MANIFEST = "backup.json"
_FORMAT = 2  # 1 had no checksums
_SECRET = "secret"
_ATTEMPTS = 50
_PAUSE_SECONDS = 0.1
_STAGING = ".backup-"
_RESTORING = ".restoring-"


@dataclass(frozen=True)
class BackupSummary:
    """The time of a backup, and the number and total size of its files, without the manifest."""

    created_at: float
    files: int
    size_bytes: int


@dataclass
class _Staging:
    """A directory with hard links to the files that are to be copied. ``linked``: the names that were linked."""

    data_dir: Path
    directory: Path
    linked: set[str] = field(default_factory=set)

    def link(self, name: str) -> bool:
        """Link a file, or all files of a directory; return whether there were any.

        A directory that is being deleted meanwhile may be linked incompletely.
        """
        source = self.data_dir / name
        try:
            files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
            for file in files:
                target = self.directory / file.relative_to(self.data_dir)
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _link(file, target)
        except FileNotFoundError:
            return False
        if files:
            self.linked.add(name)
        return bool(files)

    def drop(self, name: str) -> None:
        self.linked.discard(name)
        shutil.rmtree(self.directory / name, ignore_errors=True)


def back_up(data_dir: Path, database: Path, target: Path) -> BackupSummary:
    """Do the same as :func:`back_up_records` with the records in the SQLite file ``database``."""
    return back_up_records(data_dir, SqliteRecords(database), target)


def back_up_records(data_dir: Path, records: Records, target: Path) -> BackupSummary:
    """Copy the records, and the files in ``data_dir`` that they need, into the directory ``target``.

    ``target`` must be empty or not exist yet, otherwise TwinkleServerError.
    """
    records.check_before_backup(data_dir)
    _check_empty(target, "a backup goes into an empty directory")
    with Progress(f"backup of {data_dir}") as progress:
        progress.doing("copying the database")
        with _staging(data_dir) as staging:
            named = _stage(staging, records)
            new_parents = make_parents(target, private=False)
            target.mkdir(exist_ok=True, mode=0o700)
            names = sorted(staging.linked & (named.directories | named.old_versions | named.segments))
            progress.doing("copying files")
            for number, name in enumerate(names):
                progress.reached(number, len(names), "adapters, versions and journal files")
                _copy(staging.directory / name, target / name)
            records.write(staging.directory, target / records.file)
        _copy(data_dir / _SECRET, target / _SECRET)
        for path in target.iterdir():  # the operator may have created ``target``, readable by everybody
            restrict(path)
        progress.doing("computing checksums")
        sums = sums_of(target, _MANIFEST)
        summary = BackupSummary(time.time(), len(sums), sum(size for size, _ in sums.values()))
        progress.doing("writing everything to the disk")
        sync_all(target)
        # The manifest is written last: a backup without one is unfinished.
        write_private(target / _MANIFEST, _manifest(summary, sums))
        for directory in (target, target.parent, *(new.parent for new in new_parents)):
            sync(directory)
    return summary


def check_backup(source: Path) -> list[str]:
    """Return the names of files that are missing from the backup, are damaged, or do not belong to it.

    Raises TwinkleServerError if the manifest is missing, damaged or of an unknown format. A backup of format 1 has no
    checksums: TwinkleServerError if the number or total size of its files is wrong, otherwise no names.
    """
    _, sums = _read_manifest(source)
    if sums is None:
        return []
    found = sums_of(source, _MANIFEST)
    return sorted(name for name in sums.keys() | found.keys() if sums.get(name) != found.get(name))


def restore(source: Path, data_dir: Path, database: Path) -> BackupSummary:
    """Do the same as :func:`restore_records` with the records in the SQLite file ``database``."""
    return restore_records(source, data_dir, SqliteRecords(database))


def restore_records(source: Path, data_dir: Path, records: Records) -> BackupSummary:
    """Make ``data_dir``, which must be empty or not exist yet, from a backup, and put its records into the database.

    Raises TwinkleServerError, and changes nothing, if the backup is damaged, has its records for another kind of
    database, or if the database already holds the records of a server.
    """
    summary, _ = _read_manifest(source)
    damaged = check_backup(source)
    if damaged:
        raise TwinkleServerError(f"{source} is damaged, nothing was restored; wrong files: {', '.join(damaged)}")
    _check_empty(data_dir, "a backup is restored into an empty data directory")
    if not (source / records.file).exists():
        raise TwinkleServerError(
            f"{source} has no {records.file}: its records were in another kind of database, SQLite (state.db) or "
            "PostgreSQL (state.pgdump); restore it with a configuration whose persistence.url is of that kind"
        )
    records.check_before_restore()
    new_parents = make_parents(data_dir, private=False)
    partial = _own_directory(data_dir.parent, f".{data_dir.name}{_RESTORING}")
    try:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(_MANIFEST))
        restrict(partial)
        sync_all(partial)
        if data_dir.exists():
            data_dir.rmdir()
        new_parents += records.put_back(partial, data_dir)
        partial.rename(data_dir)
        for directory in (data_dir.parent, *(new.parent for new in new_parents)):
            sync(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def _manifest(summary: BackupSummary, sums: Mapping[str, tuple[int, int]]) -> bytes:
    content = {"format": _FORMAT, **vars(summary), "sums": sums}
    whole = {**content, "checksum": zlib.crc32(json.dumps(content).encode())}
    return (json.dumps(whole, indent=2) + "\n").encode()


def _read_manifest(source: Path) -> tuple[BackupSummary, Mapping[str, tuple[int, int]] | None]:
    """Return the summary of a backup, and (size, checksum) of its files by name.

    The second value is None for a backup of format 1, which has no checksums; then the number and total size of the
    files are compared with the summary. Raises TwinkleServerError if they differ, or if the manifest is not usable.
    """
    damaged = TwinkleServerError(f"{source / _MANIFEST} is damaged, nothing was restored")
    try:
        content = json.loads((source / _MANIFEST).read_bytes())
        form = content["format"]
    except FileNotFoundError:
        raise TwinkleServerError(f"{source} is not a backup, or an unfinished one: it has no {_MANIFEST}") from None
    except (ValueError, KeyError, TypeError):
        raise damaged from None
    if form not in (1, _FORMAT):
        raise TwinkleServerError(f"{source} was made by another version of Twinkle, in an unknown format")
    try:
        summary = BackupSummary(content["created_at"], content["files"], content["size_bytes"])
        sums = None
        if form == _FORMAT:
            sums = {str(name): (int(size), int(checksum)) for name, (size, checksum) in content["sums"].items()}
            if content["checksum"] != json.loads(_manifest(summary, sums))["checksum"]:
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged from None
    files = [path for path in source.rglob("*") if path.is_file() and path.name != _MANIFEST]
    found = len(files), sum(path.stat().st_size for path in files)
    if sums is None and found != (summary.files, summary.size_bytes):
        raise TwinkleServerError(f"{source} is damaged: {found[0]} files with {found[1]} bytes, not as in its manifest")
    return summary, sums


# --- what to copy -----------------------------------------------------------------------------------------------------


def _stage(staging: _Staging, records: Records) -> NamedFiles:
    """Choose a moment and link the files that the records name then; return their names. See the steps at the top."""
    for _ in range(_ATTEMPTS):
        named = records.choose_moment(staging.directory)
        segments = [staging.link(name) for name in named.segments - staging.linked]
        fresh = named.directories - staging.linked
        found = [staging.link(name) for name in fresh]
        for name in named.old_versions - staging.linked:
            staging.link(name)
        still_named = records.named_now().directories
        for name in fresh - still_named:  # it may have been deleted while it was linked
            staging.drop(name)
        if all(segments) and all(found) and fresh <= still_named:
            return named
        time.sleep(_PAUSE_SECONDS)
    raise TwinkleServerError("the state was not copied: some of its files were missing or deleted each time; try again")


# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _staging(data_dir: Path) -> Iterator[_Staging]:
    """Make a staging directory inside the data directory, so that hard links into it work; remove it at the end.

    Staging directories of backups that were killed are removed first.
    """
    directory = _own_directory(data_dir, _STAGING)
    directory.mkdir(mode=0o700)
    try:
        yield _Staging(data_dir, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _own_directory(parent: Path, prefix: str) -> Path:
    """Return a path that ends with this process's id; delete those that end with ids of processes that do not run."""
    for leftover in parent.glob(f"{prefix}*"):
        pid = leftover.name.removeprefix(prefix)
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    return parent / f"{prefix}{os.getpid()}"


def _runs(pid: int) -> bool:
    """Return whether a process with this id runs, under any user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links: copying takes longer, and the check afterwards is the same
        shutil.copyfile(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)
        target.chmod(0o600)


def _check_empty(directory: Path, rule: str) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TwinkleServerError(f"{directory} is not empty: {rule}")
