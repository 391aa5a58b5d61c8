"""Commands about what a server has on disk: ``backup``, ``restore``, ``check-data`` and ``clear persistence``."""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from twinkle.errors import TwinkleServerError
from twinkle.model.types import ADAPTER_FORMATS
from twinkle.server.cli.config_commands import Commands, add_command, add_described, config_of
from twinkle.server.config import ServerConfig
from twinkle.server.state.backup import BackupSummary, back_up_records, check_backup, restore_records
from twinkle.server.state.backup_records import PostgresRecords, Records, SqliteRecords
from twinkle.server.state.data_check import Finding, check_data
from twinkle.server.state.files.guards import DirectoryLock, give_up_reserve
from twinkle.server.state.integrity.copies import copied_database
from twinkle.server.state.integrity.wal_check import check_wal, set_aside
from twinkle.server.state.store import Store
from twinkle.utils.progress import Progress

_SQLITE = "sqlite:///"
_DAMAGED = 1  # exit code
_CLEARED = "sessions, live adapters, futures and unnamed sampler versions; keys, checkpoints, usage and audit log stay"
_CLEARED_DIRECTORIES = ("snapshots", "samplers")  # whose records are cleared


def add_parsers(commands: Commands) -> None:
    about = "copy the state of a server into a directory; the server may be running"
    backup = add_command(commands, "backup", _backup, about)
    backup.add_argument("directory", type=Path, metavar="DIR", help="target directory; must be empty or not exist yet")
    back = add_command(commands, "restore", _restore, "create a data directory from a backup")
    back.add_argument("directory", type=Path, metavar="DIR", help="directory of the backup")
    about = "check the state and the files of a stopped server and list damage"
    check = add_command(commands, "check-data", _check, about)
    check.add_argument(
        "--repair", action="store_true", help="repair an unusable database, or replace it with its last copy"
    )
    check.add_argument("--backup", type=Path, default=None, metavar="DIR", help="check this backup instead")
    check.add_argument("--format", choices=("text", "json"), default="text", help="default text")
    about = "write an adapter in the form that another program reads, which matters on models with experts"
    convert = add_described(commands, "convert-adapter", about)
    convert.set_defaults(run=_convert)
    convert.add_argument("adapter", type=Path, metavar="FOLDER", help="folder with adapter_config.json, in any form")
    convert.add_argument("target", type=Path, metavar="DIR", help="target directory; must be empty or not exist yet")
    convert.add_argument("--format", choices=ADAPTER_FORMATS, required=True, help="the form to write")
    convert.add_argument("--gpt-oss", action="store_true", help="the base model is a gpt-oss, with an order of its own")
    actions = commands.add_parser("clear", help="delete the state of unfinished work").add_subparsers(
        required=True, metavar="WHAT"
    )
    clear = add_command(actions, "persistence", _clear, f"delete from a stopped server: {_CLEARED}")
    clear.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def _database_file(config: ServerConfig) -> Path | None:
    """Return the SQLite file of the state; None: the state is on PostgreSQL."""
    url = config.database_url
    return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else None


# --- backup and restore -----------------------------------------------------------------------------------------------


def _backup(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    with _records(config) as records:
        summary = back_up_records(config.data_dir, records, args.directory.absolute())
    print(f"{_in_words(summary)} in {args.directory}")


def _restore(args: argparse.Namespace, _given: list[str]) -> None:
    config = config_of(args)
    with _records(config) as records, Progress(f"restoring {args.directory}"):
        summary = restore_records(args.directory.absolute(), config.data_dir, records)
    print(f"{_in_words(summary)} in {config.data_dir}; start the server as before")


def _records(config: ServerConfig) -> AbstractContextManager[Records]:
    file = _database_file(config)
    return PostgresRecords.opened(config.database_url) if file is None else nullcontext(SqliteRecords(file))


def _in_words(summary: BackupSummary) -> str:
    return f"{summary.files} files, {summary.size_bytes / 1e6:.1f} MB"


def _convert(args: argparse.Namespace, _given: list[str]) -> None:
    from twinkle.model.adapters.expert_exports import convert_folder  # imports torch, which no other command needs

    target: Path = args.target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TwinkleServerError(f"{target} is not empty; name an empty or a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with Progress(f"converting {args.adapter}"), tempfile.TemporaryDirectory(dir=target.parent) as staging:
        convert_folder(args.adapter, Path(staging), args.format, alternating=args.gpt_oss)
        shutil.copytree(staging, target, dirs_exist_ok=True)
    print(f"the adapter is in {target} in the form {args.format!r}")


# --- check-data -------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace, _given: list[str]) -> None:
    if args.backup is not None:
        damaged = check_backup(args.backup)
        findings = [Finding(f"{args.backup / name}", None, None, "take another backup") for name in damaged]
        _finish(findings, args.format, f"the backup {args.backup}")
        return
    config = config_of(args)
    if not config.data_dir.is_dir():
        raise TwinkleServerError(f"{config.data_dir} does not exist; -c or --data-dir chooses another one")
    give_up_reserve(config.data_dir, only_if_low=True)
    with DirectoryLock(config.data_dir):  # files that a running server is writing would look damaged
        database = _database_file(config)
        with Progress(f"checking {config.data_dir}"):
            findings = list(check_data(config.data_dir, database))
        if args.repair and database is not None and any(finding.needs_copy for finding in findings):
            print(_repair(config.data_dir, database), file=sys.stderr)
            findings = list(check_data(config.data_dir, database))
    _finish(findings, args.format, f"{config.data_dir}")


def _repair(data_dir: Path, database: Path) -> str:
    """Repair a damaged database, keep the damaged files beside it, and return a sentence on what was done.

    A write-ahead log whose beginning can still be read and applied is cut after it. Otherwise the last copy of the
    database takes the place of the database; TwinkleServerError if there is no copy.
    """
    stamp = f"damaged-{int(time.time())}"
    wal = check_wal(database) if database.exists() else None
    if wal is not None and wal.is_consistent:
        kept = wal.file.with_name(f"{wal.file.name}.{stamp}")
        if wal.file.exists():
            shutil.copy2(wal.file, kept)
            os.truncate(wal.file, wal.good_bytes)
        database.with_name(f"{database.name}-shm").unlink(missing_ok=True)
        lost = wal.committed - wal.found
        return (
            f"{wal.file} was cut after {wal.found} readable frames; {lost} later frames are lost; damaged log: {kept}"
        )
    copy = copied_database(data_dir)
    if not copy.exists():
        raise TwinkleServerError(f"there is no copy of {database}: restore a backup")
    if wal is not None:
        set_aside(database)
    for suffix in ("", "-wal", "-shm"):
        file = database.with_name(f"{database.name}{suffix}")
        if file.exists():
            os.replace(file, file.with_name(f"{file.name}.{stamp}"))
    shutil.copyfile(copy, database)
    database.chmod(0o600)
    made = datetime.fromtimestamp(copy.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"{database} is now the copy of {made}; what was recorded later is lost: sessions, requests, results and "
        f"checkpoints since then. The damaged file is {database}.{stamp}"
    )


def _finish(findings: list[Finding], form: str, what: str) -> None:
    """Print the findings, and exit with code 1 if there are any."""
    if form == "json":
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    elif not findings:
        print(f"{what}: nothing is damaged")
    else:
        for finding in findings:
            whose = ", ".join(
                f"{kind} {name}" for kind, name in (("tenant", finding.tenant_id), ("run", finding.run_id)) if name
            )
            print(f"damaged: {finding.what}\n  whose: {whose or 'the server'}\n  remedy: {finding.remedy}")
        print(f"{what}: {len(findings)} damaged")
    if findings:
        sys.exit(_DAMAGED)


# --- clear persistence ------------------------------------------------------------------------------------------------


def _clear(args: argparse.Namespace, _given: list[str]) -> None:
    """Delete the state of unfinished work if the operator agrees. Keys, checkpoints, usage and audit log stay."""
    config = config_of(args)
    if not args.yes and not _agreed(config):
        raise TwinkleServerError("nothing was cleared; --yes clears without asking")
    records = asyncio.run(_clear_state(config))
    mode = config.database_url.partition(":")[0]
    print(f"cleared {records} records of the state in {config.data_dir} (mode={mode})")


def _agreed(config: ServerConfig) -> bool:
    print(f"{config.data_dir}: delete {_CLEARED}. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _clear_state(config: ServerConfig) -> int:
    """Delete the state of unfinished work, with its files, and return the number of records deleted.

    The state is opened with the lock that a server takes, so this raises while a server runs.
    """
    store = await Store.open(config.data_dir, config.database_url)
    try:
        records = await store.retention.clear()
        await store.ops.prune(time.time(), 0, 0)  # empties the journal: without its ops nothing in it is needed
        for name in _CLEARED_DIRECTORIES:
            shutil.rmtree(config.data_dir / name, ignore_errors=True)
        return records
    finally:
        await store.close()
