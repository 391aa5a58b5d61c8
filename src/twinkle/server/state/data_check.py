"""The check behind ``twinkle-server check-data``: what is damaged on disk, who owns it, and how it can be repaired.

Nothing is changed. With the records on PostgreSQL only the secret is checked: rows are then checked when a server with
one process starts, and PostgreSQL maintains its own structure.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from twinkle.errors import CheckpointError
from twinkle.server.state.database.journal import Journal
from twinkle.server.state.database.sqlite import as_sql
from twinkle.server.state.errors import JournalError
from twinkle.server.state.files.file_checksums import damaged_files
from twinkle.server.state.integrity.copies import copied_database, secret_problem
from twinkle.server.state.integrity.sqlite_check import check_structure, connect, is_whole, read_table, row_tables
from twinkle.server.state.integrity.wal_check import check_wal
from twinkle.server.state.records.ops import OPS_WITH_BODIES
from twinkle.server.types import BlobRef

_RUN_IS_FAILED = (
    "the next start fails what depends on it, at most this run; its checkpoints can be loaded into a new one"
)
_FROM_COPY = "the next start puts it back from the copy, or logs what is lost"
_REPAIR = "twinkle-server check-data --repair puts back the copy in copies/, twinkle-server restore a backup"


@dataclass(frozen=True)
class Finding:
    """One damaged thing.

    ``what`` names it. ``remedy`` says what can be restored, and how. ``is_fatal``: a server refuses to start with it.
    """

    what: str
    tenant_id: str | None
    run_id: str | None
    remedy: str
    is_fatal: bool = False

    @property
    def needs_copy(self) -> bool:
        """Return whether the copy of the database has to take the place of the database."""
        return self.remedy == _REPAIR

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def check_data(data_dir: Path, database: Path | None) -> Iterator[Finding]:
    """Yield the damage of the secret, the database, the rows, the files that rows name, and the database's copy.

    ``database`` is the SQLite file; with None (PostgreSQL) only the secret is checked. If the file, its WAL or its
    structure is damaged, nothing after it is checked.
    """
    problem = secret_problem(data_dir) if (data_dir / "secret").exists() or (data_dir / "copies").exists() else None
    if problem is not None:
        yield Finding(problem, None, None, "see the description", is_fatal="there is no copy" in problem)
    if database is None:
        return
    if not database.exists() or database.stat().st_size == 0:
        yield Finding(f"{database} is missing or empty", None, None, _REPAIR, is_fatal=True)
        return
    wal = check_wal(database)
    if wal is not None and wal.is_needed:
        yield Finding(f"{wal.file} {wal}", None, None, _REPAIR, is_fatal=True)
        return
    try:
        with closing(connect(database, read_only=True)) as connection:
            structure = check_structure(connection)
            if structure.broken is not None:
                yield Finding(f"{database}: {structure.broken}", None, None, _REPAIR, is_fatal=True)
                return
            if structure.indexes:
                yield Finding(f"{database}: an index", None, None, "the next start rebuilds it; nothing is lost")
            yield from _rows(connection)
            yield from _files(connection, data_dir)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        yield Finding(f"{database}: {error}", None, None, _REPAIR, is_fatal=True)
    yield from _copy(data_dir)


def _rows(connection: sqlite3.Connection) -> Iterator[Finding]:
    for table in row_tables(connection):
        for row in read_table(connection, table).damaged:
            shown = {key: value for key, value in row.items() if isinstance(value, str | int) and key != "checksum"}
            run_id = row.get("run_id") or row.get("adapter_id")
            remedy = _RUN_IS_FAILED if table == "ops" else _FROM_COPY
            name = dict(list(shown.items())[:3])
            yield Finding(f"a row of the table {table}, {name}", _text(row.get("tenant_id")), _text(run_id), remedy)


def _files(connection: sqlite3.Connection, data_dir: Path) -> Iterator[Finding]:
    owners = {row["run_id"]: row for row in read_table(connection, "runs").good}
    with_bodies = set(connection.execute(as_sql(OPS_WITH_BODIES)))
    for kind, place in (("bodies", "body"), ("outcomes", "outcome")):
        journal = Journal(data_dir / "journal" / kind, writable=False)
        for op in read_table(connection, "ops").good:
            is_needed = kind == "outcomes" or (op["adapter_id"], op["seq"]) in with_bodies
            if op[f"{place}_segment"] is None or not is_needed:
                continue
            try:
                journal.read(BlobRef(op[f"{place}_segment"], op[f"{place}_offset"], op[f"{place}_length"]))
            except (JournalError, OSError) as error:
                remedy = _RUN_IS_FAILED if kind == "bodies" else "the client must send the request again"
                what = f"{place} of request {op['adapter_id']}:{op['seq']} ({error})"
                yield Finding(what, owners.get(op["adapter_id"], {}).get("tenant_id"), op["adapter_id"], remedy)
    yield from _directories(connection, data_dir, owners)


def _directories(
    connection: sqlite3.Connection, data_dir: Path, owners: dict[str, dict[str, Any]]
) -> Iterator[Finding]:
    for row in read_table(connection, "snapshots").good:
        tenant_id = owners.get(row["adapter_id"], {}).get("tenant_id")
        about = Finding("snapshot", tenant_id, row["adapter_id"], _RUN_IS_FAILED)
        yield from _directory(data_dir / row["directory"], about)
    named = set()
    for row in read_table(connection, "checkpoints").good:
        named.add(row["directory"])
        name = f"checkpoint tinker://{row['run_id']}/{row['kind']}/{row['name']}"
        remedy = "load another checkpoint, or take it from a backup"
        yield from _directory(data_dir / row["directory"], Finding(name, row["tenant_id"], row["run_id"], remedy))
    sessions = {row["session_id"]: row["state"] for row in read_table(connection, "sessions").good}
    for row in read_table(connection, "sampling_sessions").good:
        is_active = sessions.get(row["session_id"]) == "active"
        if row["directory"] is not None and row["directory"] not in named and is_active:
            about = Finding(f"sampler version {row['sampling_session_id']}", row["tenant_id"], None, "publish it again")
            yield from _directory(data_dir / row["directory"], about)


def _directory(place: Path, about: Finding) -> Iterator[Finding]:
    """Yield ``about`` for each damaged file of a directory, with the file added to its ``what``.

    Yield it once if the directory is missing or its ``checksums.json`` is damaged.
    """
    problems: list[str]
    if not place.is_dir():
        problems = [f"{place} is missing"]
    else:
        try:
            problems = [str(place / file) for file in damaged_files(place)]
        except CheckpointError as error:
            problems = [str(error)]
    for problem in problems:
        yield replace(about, what=f"{about.what}: {problem}")


def _copy(data_dir: Path) -> Iterator[Finding]:
    copy = copied_database(data_dir)
    if not copy.exists():
        return
    whole = False
    with suppress(sqlite3.Error, UnicodeDecodeError), closing(connect(copy, read_only=True)) as connection:
        whole = is_whole(connection, check_structure(connection))
    if not whole:
        yield Finding(f"{copy} is damaged", None, None, "the next start makes it again")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
