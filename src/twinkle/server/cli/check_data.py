"""``twinkle-server check-data``: read everything that a server has on disk, and say what is damaged."""

import argparse
import json
import os
import shutil
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from twinkle.errors import TwinkleServerError
from twinkle.server.cli.opening import config_of, server_options
from twinkle.server.config import ServerConfig
from twinkle.server.state.backup import check_backup
from twinkle.server.state.data_check import Finding, check_data
from twinkle.server.state.files.guards import DirectoryLock, give_up_reserve
from twinkle.server.state.integrity.copies import copied_database
from twinkle.server.state.integrity.wal_check import check_wal, set_aside

__all__ = ["add_parser"]

_SQLITE = "sqlite:///"
_DAMAGED = 1


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "check-data", help="read all that a server, which does not run, has on disk, and say what is damaged"
    )
    parser.set_defaults(run=_check)
    parser.add_argument("--repair", action="store_true", help="put back a copy of a database that cannot be used")
    parser.add_argument("--backup", type=Path, default=None, metavar="DIR", help="check this backup instead")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    server_options(parser)


def _check(args: argparse.Namespace, _given: list[str]) -> None:
    if args.backup is not None:
        damaged = check_backup(args.backup)
        findings = [Finding(f"{args.backup / name}", None, None, "take another backup") for name in damaged]
        _finish(findings, args.format, f"the backup {args.backup}")
        return
    config = config_of(args)
    if not config.data_dir.is_dir():
        raise TwinkleServerError(f"{config.data_dir} does not exist; -c or --data-dir says which one is meant")
    give_up_reserve(config.data_dir, only_if_low=True)
    lock = DirectoryLock(config.data_dir)  # what a server is writing would look damaged
    try:
        database = _database(config)
        findings = list(check_data(config.data_dir, database))
        if args.repair and database is not None and any(finding.is_fatal for finding in findings):
            print(_repair(config.data_dir, database), file=sys.stderr)
            findings = list(check_data(config.data_dir, database))
    finally:
        lock.release()
    _finish(findings, args.format, f"{config.data_dir}")


def _database(config: ServerConfig) -> Path | None:
    url = config.database_url
    return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else None


def _repair(data_dir: Path, database: Path) -> str:
    """Put a database in the place of one that is damaged, which is kept; returns what was done."""
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
            f"of {wal.file} the {wal.found} frames that can be read are used; {lost} behind them are lost; see {kept}"
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
    """Print, and end with exit code 1 where something is damaged."""
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
