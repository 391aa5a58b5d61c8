"""Repair of damaged rows when a server starts on SQLite. Each affects only the run, session or key it belongs to.

Rows of sessions, runs, sampling sessions, checkpoints, API keys and custom losses are put back from the server's copy
of the database if it has them and they are still valid. Otherwise a run is failed, a session is ended (its adapters are
then evicted), the record of a checkpoint is made from its files, and the row of anything else is removed. A damaged op
fails its run. So does a damaged snapshot, unless all ops since the run's creation are on record. Damaged rows of other
tables are removed. Everything is reported in the log and in the table ``damage``. Ids in a damaged row may be wrong, so
they are compared with those in undamaged rows, and tenants are taken from undamaged rows or from the copy.

If a damaged op fits no run, nothing is repaired and the server does not start.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from twinkle.model.types import LoraSpec
from twinkle.server.ids import directory_name
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import CHECKPOINTS, METADATA, SESSIONS
from twinkle.server.state.errors import Damage, lost_run
from twinkle.server.state.files.data_dir import size_of
from twinkle.server.state.integrity.copies import copied_database
from twinkle.server.state.integrity.row_checksums import CHECKSUM, row_checksum
from twinkle.server.state.integrity.sqlite_check import Contents, connect, read_table, row_tables
from twinkle.server.types import CheckpointKind, CheckpointRecord, SessionRecord, stored_spec

Row = dict[str, Any]

_logger = logging.getLogger(__name__)

# The rows of these tables are always kept in memory, because owners are looked up in them. Other tables are kept in
# memory only if they have damaged rows.
_OWNERS = ("runs", "sessions", "checkpoints", "sampling_sessions", "snapshots")
_SESSION = RecordMapper(SessionRecord, SESSIONS)
_CHECKPOINT = RecordMapper(CheckpointRecord, CHECKPOINTS)
# Values for the columns of a damaged run whose own values are not plausible.
_OTHERWISE: Row = {
    "number": 0,
    "base_model": "",
    "model_name": "",
    "spec": json.dumps(stored_spec(LoraSpec(rank=1))),
    "user_metadata": "{}",
    "replica": "",
}


def put_right(connection: sqlite3.Connection, data_dir: Path) -> int:
    """Repair or remove all damaged rows in one transaction; return how many there were.

    Raises sqlite3.Error if that fails, or if a damaged op fits no run.
    """
    repair = _Repair(data_dir)
    for name in row_tables(connection):
        contents = read_table(connection, name)
        if contents.damaged or name in _OWNERS:
            repair.tables[name] = contents
    damaged = sum(len(contents.damaged) for contents in repair.tables.values())
    if damaged == 0:
        return 0
    if "ops" not in repair.tables:
        repair.tables["ops"] = read_table(connection, "ops")
    repair.decide()
    connection.execute("PRAGMA foreign_keys=OFF")
    connection.execute("BEGIN IMMEDIATE")
    for name in repair.changed:
        # All rows are written again, because a row whose key is damaged cannot be found by its key.
        connection.execute(f"DELETE FROM {name}")
        _insert(connection, "IGNORE", name, repair.tables[name].good)
    _insert(connection, "REPLACE", "damage", [_with_checksum(vars(entry)) for entry in repair.entries])
    connection.execute("COMMIT")
    return damaged


def _insert(connection: sqlite3.Connection, otherwise: str, name: str, rows: Sequence[Row]) -> None:
    """Insert rows, which all have the same columns. ``otherwise``: IGNORE or REPLACE, if a row has the same key."""
    if rows:
        columns = list(rows[0])
        into = f"INSERT OR {otherwise} INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        connection.executemany(into, [[row[column] for column in columns] for row in rows])


def _with_checksum(row: Row) -> Row:
    return {**row, CHECKSUM: row_checksum([row[column] for column in sorted(row)])}


@dataclass
class _Repair:
    """The content of the tables, with the decisions about damaged rows applied to it in memory."""

    data_dir: Path
    tables: dict[str, Contents] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # tables that must be written again
    entries: list[Damage] = field(default_factory=list)  # for the table ``damage``

    def decide(self) -> None:
        """Decide about all damaged rows: sessions and runs first, because decisions about other rows depend on them."""
        deciding: Mapping[str, Callable[[str, Row], None]] = {
            "sessions": self._sessions,
            "runs": self._runs,
            "sampling_sessions": partial(self._same_or_gone, "sampling session", "create another one"),
            "checkpoints": self._checkpoints,
            "snapshots": self._snapshots,
            "ops": self._ops,
            "api_keys": self._api_keys,
            "tenants": partial(self._same_or_gone, "name of", "twinkle-server rename-tenant names the tenant again"),
            "custom_losses": partial(self._same_or_gone, "custom loss", "create it again"),
        }
        for name in sorted(self.tables, key=lambda name: [*deciding, name].index(name)):
            for row in self.tables[name].damaged:
                self.changed.add(name)
                deciding.get(name, self._other)(name, row)

    # --- by table -----------------------------------------------------------------------------------------------------

    def _sessions(self, name: str, row: Row) -> None:
        belonging = (*self._good("runs"), *self._good("sampling_sessions"))
        tenants = {other["session_id"]: other["tenant_id"] for other in belonging}
        known = tenants.keys() - {other["session_id"] for other in self._good(name)}
        copied = self._copied(name, row)
        session_id = _nearest(row["session_id"], known) or (copied["session_id"] if copied else None)
        if session_id is None:
            self._report(f"session {row['session_id']}", "its record is damaged, nothing refers to it: it is removed")
            return
        copied = copied or self._copied(name, {"session_id": session_id})
        now = time.time()
        if copied is not None:
            tenants.setdefault(session_id, copied["tenant_id"])
            if copied["state"] == row["state"]:
                self._put_back(name, copied | {"last_seen": now}, f"session {session_id}")
                return
        what = "the session's record was damaged on the server's disk: make a new client"
        tenant_id, created_at = tenants[session_id], _believed(row, {"created_at": now})["created_at"]
        session = SessionRecord(
            session_id, tenant_id, created_at, now, "expired", finish_reason="errored", finish_detail=what
        )
        self._put(name, _SESSION.row(session))
        self._report(f"session {session_id}", f"{what}; its adapters are evicted", tenant_id)

    def _runs(self, name: str, row: Row) -> None:
        named = {
            other[column]
            for table, column in (("ops", "adapter_id"), ("snapshots", "adapter_id"), ("checkpoints", "run_id"))
            for other in self._good(table)
        } - {other["run_id"] for other in self._good(name)}
        copied = self._copied(name, row)
        run_id = _nearest(row["run_id"], named) or (copied and copied["run_id"]) or _text(row["run_id"])
        copied = copied or self._copied(name, {"run_id": run_id})
        if copied is not None:
            state = row["state"] if row["state"] in ("live", "failed", "parked") else "failed"
            note = copied["note"] if state == copied["state"] else None
            self._put_back(name, copied | {"state": state, "note": note}, f"run {run_id}", run_id)
            return
        tenants = {other["session_id"]: other["tenant_id"] for other in self._good("sessions")}
        session_id = next(
            (each for each in tenants if run_id.startswith((f"{each}:train:", f"{each}-"))), row["session_id"]
        )
        if session_id not in tenants:
            self._report(f"run {run_id}", "its record is damaged, its session is unknown: it is removed", None, run_id)
            return
        message = lost_run(run_id, "its record was damaged on the server's disk")
        owned = {"run_id": run_id, "session_id": session_id, "tenant_id": tenants[session_id]}
        number = run_id.rpartition(":train:")[2]
        if number.isdigit():
            owned["number"] = int(number)
        otherwise = _OTHERWISE | dict.fromkeys(("created_at", "last_request_at"), time.time())
        self._put(name, _believed(row, otherwise) | owned | {"state": "failed", "note": message})
        self._report(f"run {run_id}", message, tenants[session_id], run_id)

    def _snapshots(self, name: str, row: Row) -> None:
        with_one = {other["adapter_id"] for other in self._good(name)}
        live = {run["run_id"] for run in self._good("runs") if run["state"] == "live"} - with_one
        run_id = _nearest(row["adapter_id"], live)
        if run_id is None:
            self._report(f"snapshot of {row['adapter_id']}", "its record is damaged and fits no live run: removed")
            return
        if self._has_gap(run_id, -1) is False:
            what = "the record of its snapshot was damaged: all ops since its creation are replayed from the journal"
            self._report(f"snapshot of {run_id}", what, self._tenant(run_id), run_id)
            return
        self._fail(run_id, "the record of its snapshot was damaged on the server's disk")

    def _ops(self, name: str, row: Row) -> None:
        runs = {run["run_id"] for run in self._good("runs")}
        run_id = _nearest(row["adapter_id"], runs) or self._with_a_gap()
        if run_id is None:
            raise sqlite3.DatabaseError("a damaged row of the table ops belongs to no known run")
        self._fail(run_id, "the record of one of its requests was damaged on the server's disk")

    def _checkpoints(self, name: str, row: Row) -> None:
        path = f"tinker://{row['run_id']}/{row['kind']}/{row['name']}"
        copied = self._copied(name, row)
        found = copied or self._from_directory(row)
        if found is None:
            self._report(f"checkpoint {path}", "its record is damaged, its files were not identified: it is removed")
            return
        path = f"tinker://{found['run_id']}/{found['kind']}/{found['name']}"
        self._put(name, found)
        how = "from the copy" if copied else "from its files: private, without expiry, without metadata"
        self._report(f"record of {path}", f"it was damaged: it is restored {how}", found["tenant_id"], found["run_id"])

    def _from_directory(self, row: Row) -> Row | None:
        """Make the record of a checkpoint from its directory; None if the directory or its run cannot be determined.

        The directory is the one that the damaged row names, if it exists and no other record names it, or else the
        only checkpoint directory that no record names.
        """
        named = {other["directory"] for other in self._good("checkpoints")}
        places = self.data_dir.glob("checkpoints/*/*/*/*")
        directories = [path for path in places if path.is_dir() and path.name.isdigit()]
        free = [path for path in directories if str(path.relative_to(self.data_dir)) not in named]
        place = [path for path in free if str(path.relative_to(self.data_dir)) == row["directory"]]
        if len(place or free) != 1:
            return None
        directory = (place or free)[0]
        run_name, kind, name, seq = directory.relative_to(self.data_dir / "checkpoints").parts
        run = next((run for run in self._good("runs") if directory_name(run["run_id"]) == run_name), None)
        if run is None:
            return None
        checkpoint = CheckpointRecord(
            run_id=run["run_id"],
            kind=cast("CheckpointKind", kind),
            name=name,
            tenant_id=run["tenant_id"],
            request_id=f"{run['run_id']}:{seq}",
            directory=str(directory.relative_to(self.data_dir)),
            created_at=directory.stat().st_mtime,
            size_bytes=size_of(directory),
        )
        return _CHECKPOINT.row(checkpoint)

    def _api_keys(self, name: str, row: Row) -> None:
        copied = self._copied(name, row)
        if copied is not None and copied["revoked_at"] is None and row["revoked_at"] is None:
            self._put_back(name, copied, f"key {copied['key_id']}")
            return
        tenant = row["tenant_id"] if copied is None else copied["tenant_id"]
        command = f"`twinkle-server keys create --tenant {tenant}` makes a new one"
        self._report(f"key {row['key_id']}", f"its record is damaged: the key does not work any more; {command}")

    def _same_or_gone(self, kind: str, advice: str, name: str, row: Row) -> None:
        """Put back a row that never changes from the copy of the database; remove it if the copy does not have it."""
        copied = self._copied(name, row)
        (key,) = _key(name)
        if copied is not None:
            self._put_back(name, copied, f"record of {copied[key]}")
            return
        message = f"{kind} {row[key]}: its record was damaged on the server's disk; {advice}"
        self._report(f"{kind} {row[key]}", message)

    def _other(self, name: str, row: Row) -> None:
        content = {column: value for column, value in row.items() if column != CHECKSUM}
        shown = json.dumps(content, default=str)[:500]
        subject = f"row of {name} {row_checksum([shown]):08x}"  # a name for the row, whose key may be damaged
        self._report(subject, f"a row of the table {name} is damaged: it is removed; its content was {shown}")

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _good(self, name: str) -> Sequence[Row]:
        """Return the undamaged rows of a table, including those that were repaired."""
        contents = self.tables.get(name)
        return () if contents is None else contents.good

    def _put(self, name: str, row: Row) -> None:
        """Add a row with its checksum to a table; missing columns become NULL."""
        columns = self.tables[name].columns
        whole = {column: row.get(column) for column in columns if column != CHECKSUM}
        self.tables[name].good.append(_with_checksum(whole))

    def _put_back(self, name: str, row: Row, subject: str, run_id: str | None = None) -> None:
        self._put(name, row)
        self._report(subject, "its record was damaged: it is put back from the copy", row["tenant_id"], run_id)

    def _fail(self, run_id: str, what: str) -> None:
        """Fail a run, if it is live, and report why."""
        message = lost_run(run_id, what)
        for run in self._good("runs"):
            if run["run_id"] == run_id:
                self.tables["runs"].good.remove(run)
                is_live = run["state"] == "live"
                self._put("runs", run | ({"state": "failed", "note": message} if is_live else {}))
                self.changed.add("runs")
                break
        self._report(f"run {run_id}", message, self._tenant(run_id), run_id)

    def _tenant(self, run_id: str) -> str | None:
        return next((run["tenant_id"] for run in self._good("runs") if run["run_id"] == run_id), None)

    def _with_a_gap(self) -> str | None:
        """Return the live run with a missing sequence number among its ops; None unless there is exactly one."""
        covered = {each["adapter_id"]: each["seq"] for each in self._good("snapshots")}
        live = [run["run_id"] for run in self._good("runs") if run["state"] == "live"]
        with_gap = [run_id for run_id in live if self._has_gap(run_id, covered.get(run_id, -1))]
        return with_gap[0] if len(with_gap) == 1 else None

    def _has_gap(self, run_id: str, after: int) -> bool | None:
        """Return whether a sequence number is missing among the run's ops after ``after``; None without such ops."""
        seqs = {op["seq"] for op in self._good("ops") if op["adapter_id"] == run_id and op["seq"] > after}
        return seqs != set(range(after + 1, max(seqs) + 1)) if seqs else None

    def _copied(self, name: str, row: Row) -> Row | None:
        """Return a damaged row as the copy of the database has it, or None.

        It is found by its key, or, if the key itself is damaged, as the only row of the copy that has no undamaged row
        here and differs from the damaged one in one column.
        """
        rows: Sequence[Row] = ()
        with (
            suppress(sqlite3.Error, UnicodeDecodeError, OSError),
            closing(connect(copied_database(self.data_dir), read_only=True)) as copy,
        ):
            rows = read_table(copy, name).good
        key = itemgetter(*_key(name))
        here = set(map(key, self._good(name)))
        missing = [other for other in rows if key(other) not in here]
        same = [other for other in missing if all(other[column] == row.get(column) for column in _key(name))]
        likely = same or [other for other in missing if _differences(other, row) == 1]  # the key itself is damaged
        return likely[0] if len(likely) == 1 else None

    def _report(self, subject: str, message: str, tenant_id: str | None = None, run_id: str | None = None) -> None:
        """Log a damage and add an entry for the table ``damage``."""
        subject, message = _printable(subject), _printable(message)
        _logger.error("damaged: %s (tenant %s): %s", subject, tenant_id or "unknown", message)
        whole = message if message.startswith(subject) or ":" in message else f"{subject}: {message}"
        self.entries.append(Damage(subject, whole, time.time(), tenant_id, run_id))


def _key(table: str) -> tuple[str, ...]:
    """Return the primary key columns of a table."""
    return tuple(column.name for column in METADATA.tables[table].primary_key)


def _nearest(value: object, known: Iterable[str]) -> str | None:
    """Return the known id that a possibly damaged value stands for, or None if that is ambiguous.

    This is the same id; or the only one of the same length that differs least, in at most two characters; or the only
    one of which the value is a prefix, or the other way round.
    """
    ids = list(known)
    if value in ids:
        return str(value)
    text = _text(value)
    alike = [each for each in ids if len(each) == len(text)]
    distances = {each: sum(a != b for a, b in zip(each, text, strict=True)) for each in alike}
    near = [each for each in alike if distances[each] == min(distances.values()) <= 2]
    if len(near) != 1:
        near = [each for each in ids if text and (each.startswith(text) or text.startswith(each))]
    return near[0] if len(near) == 1 else None


def _differences(one: Row, other: Row) -> int:
    return sum(one.get(column) != other.get(column) for column in one if column != CHECKSUM)


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _text(value: object) -> str:
    return _printable(value) if isinstance(value, str) else ""


def _believed(row: Row, otherwise: Row) -> Row:
    """Return the columns of ``otherwise``, each with the damaged row's value if it is plausible, or else the default.

    A value is plausible if it has the type of the default. If the default is a JSON object, the value must be one too,
    with the same names unless the default is empty.
    """
    believed = {}
    for column, default in otherwise.items():
        value = _printable(row[column]) if isinstance(row[column], str) else row[column]
        is_json = isinstance(default, str) and default.startswith("{")
        is_right = type(value) is type(default) and (not is_json or _is_object_like(value, default))
        believed[column] = value if is_right else default
    return believed


def _is_object_like(text: str, other: str) -> bool:
    try:
        read, names = json.loads(text), json.loads(other).keys()
    except ValueError:
        return False
    return isinstance(read, dict) and (not names or read.keys() == names)
