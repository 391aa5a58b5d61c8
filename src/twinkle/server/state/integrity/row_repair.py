"""What becomes of damaged rows when a server starts on SQLite: each costs only the run, session or key it belongs to.

Where the copy of the database that the server keeps has the row, and the row never changes, it is put back: nothing is
lost. Otherwise the run is failed, the session ended (with its adapters evicted), and the rest is removed;
all of it is put on record in the table ``damage`` and in the log. No column of a damaged row is believed where it says
whose something is: that is taken from other rows.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
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
from twinkle.server.types import CheckpointKind, CheckpointRecord, SessionRecord

Row = dict[str, Any]

_logger = logging.getLogger(__name__)

# Of these tables all rows are looked at, and of the others only those with damaged rows are kept in memory.
_OWNERS = ("runs", "sessions", "checkpoints", "sampling_sessions", "snapshots")
_SESSION = RecordMapper(SessionRecord, SESSIONS)
_CHECKPOINT = RecordMapper(CheckpointRecord, CHECKPOINTS)
# What a run's row holds where the damaged row cannot be believed.
_OTHERWISE: Row = {
    "number": 0,
    "base_model": "",
    "model_name": "",
    "spec": json.dumps(asdict(LoraSpec(rank=1))),
    "user_metadata": "{}",
    "replica": "",
}


def put_right(connection: sqlite3.Connection, data_dir: Path) -> int:
    """Deal with all damaged rows in one transaction; returns how many there were. Raises sqlite3.Error."""
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
        connection.execute(f"DELETE FROM {name}")  # written anew: a row whose key is damaged cannot be found by it
        _insert(connection, "IGNORE", name, repair.tables[name].good)
    _insert(connection, "REPLACE", "damage", [_with_checksum(vars(entry)) for entry in repair.entries])
    connection.execute("COMMIT")
    return damaged


def _insert(connection: sqlite3.Connection, otherwise: str, name: str, rows: Sequence[Row]) -> None:
    """Insert rows, which all have the same columns. ``otherwise``: what to do where there is one of the same key."""
    if rows:
        columns = list(rows[0])
        into = f"INSERT OR {otherwise} INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        connection.executemany(into, [[row[column] for column in columns] for row in rows])


def _with_checksum(row: Row) -> Row:
    return {**row, CHECKSUM: row_checksum([row[column] for column in sorted(row)])}


@dataclass
class _Repair:
    data_dir: Path
    tables: dict[str, Contents] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    entries: list[Damage] = field(default_factory=list)

    def decide(self) -> None:
        """Decide about all damaged rows, those of owners first, then those that belong to them."""
        deciding: Mapping[str, Callable[[str, Row], None]] = {
            "sessions": self._sessions,
            "runs": self._runs,
            "sampling_sessions": partial(self._same_or_gone, "sampling session", "create another one"),
            "checkpoints": self._checkpoints,
            "snapshots": self._snapshots,
            "ops": self._ops,
            "api_keys": self._api_keys,
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
            self._say(f"session {row['session_id']}", "its record is damaged, and nothing belongs to it: it is removed")
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
        self._say(f"session {session_id}", f"{what}; its adapters are parked", tenant_id)

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
            self._say(f"run {run_id}", "its record is damaged, its session is not known: it is removed", None, run_id)
            return
        message = lost_run(run_id, "its record was damaged on the server's disk")
        owned = {"run_id": run_id, "session_id": session_id, "tenant_id": tenants[session_id]}
        number = run_id.rpartition(":train:")[2]
        if number.isdigit():
            owned["number"] = int(number)
        otherwise = _OTHERWISE | dict.fromkeys(("created_at", "last_request_at"), time.time())
        self._put(name, _believed(row, otherwise) | owned | {"state": "failed", "note": message})
        self._say(f"run {run_id}", message, tenants[session_id], run_id)

    def _snapshots(self, name: str, row: Row) -> None:
        with_one = {other["adapter_id"] for other in self._good(name)}
        live = {run["run_id"] for run in self._good("runs") if run["state"] == "live"} - with_one
        run_id = _nearest(row["adapter_id"], live)
        if run_id is None:
            self._say(f"snapshot of {row['adapter_id']}", "its record is damaged, and no live run misses one")
            return
        if self._has_gap(run_id, -1) is False:
            what = "the record of its snapshot was damaged: it is brought back from its journal, from its creation on"
            self._say(f"snapshot of {run_id}", what, self._tenant(run_id), run_id)
            return
        self._fail(run_id, "the record of its snapshot was damaged on the server's disk")

    def _ops(self, name: str, row: Row) -> None:
        runs = {run["run_id"] for run in self._good("runs")}
        run_id = _nearest(row["adapter_id"], runs) or self._with_a_gap()
        if run_id is None:
            raise sqlite3.DatabaseError("a damaged row of the table ops belongs to nobody that is known")
        self._fail(run_id, "the record of one of its requests was damaged on the server's disk")

    def _checkpoints(self, name: str, row: Row) -> None:
        path = f"tinker://{row['run_id']}/{row['kind']}/{row['name']}"
        copied = self._copied(name, row)
        found = copied or self._from_directory(row)
        if found is None:
            self._say(f"checkpoint {path}", "its record is damaged, and its files are not found: it is removed")
            return
        path = f"tinker://{found['run_id']}/{found['kind']}/{found['name']}"
        self._put(name, found)
        how = "from the copy" if copied else "from its files: private, kept until it is deleted, without metadata"
        self._say(f"record of {path}", f"it was damaged: it is made again {how}", found["tenant_id"], found["run_id"])

    def _from_directory(self, row: Row) -> Row | None:
        """Make a record from the only directory that no other record names, at its place or anywhere."""
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
        self._say(f"key {row['key_id']}", f"its record is damaged: the key does not work any more; {command}")

    def _same_or_gone(self, kind: str, advice: str, name: str, row: Row) -> None:
        """Put back the copy of a row that never changes; without one, the row is gone."""
        copied = self._copied(name, row)
        (key,) = _key(name)
        if copied is not None:
            self._put_back(name, copied, f"record of {copied[key]}")
            return
        message = f"{kind} {row[key]}: its record was damaged on the server's disk; {advice}"
        self._say(f"{kind} {row[key]}", message)

    def _other(self, name: str, row: Row) -> None:
        content = {column: value for column, value in row.items() if column != CHECKSUM}
        shown = json.dumps(content, default=str)[:500]
        subject = f"row of {name} {row_checksum([shown]):08x}"  # it has no other name
        self._say(subject, f"a row of the table {name} is damaged: it is removed; it reads {shown}")

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _good(self, name: str) -> Sequence[Row]:
        contents = self.tables.get(name)
        return () if contents is None else contents.good

    def _put(self, name: str, row: Row) -> None:
        columns = self.tables[name].columns
        whole = {column: row.get(column) for column in columns if column != CHECKSUM}
        self.tables[name].good.append(_with_checksum(whole))

    def _put_back(self, name: str, row: Row, subject: str, run_id: str | None = None) -> None:
        self._put(name, row)
        self._say(subject, "its record was damaged: it is put back from the copy", row["tenant_id"], run_id)

    def _fail(self, run_id: str, what: str) -> None:
        message = lost_run(run_id, what)
        for run in self._good("runs"):
            if run["run_id"] == run_id:
                self.tables["runs"].good.remove(run)
                is_live = run["state"] == "live"
                self._put("runs", run | ({"state": "failed", "note": message} if is_live else {}))
                self.changed.add("runs")
                break
        self._say(f"run {run_id}", message, self._tenant(run_id), run_id)

    def _tenant(self, run_id: str) -> str | None:
        return next((run["tenant_id"] for run in self._good("runs") if run["run_id"] == run_id), None)

    def _with_a_gap(self) -> str | None:
        """Return the only live run among whose ops a number is missing."""
        covered = {each["adapter_id"]: each["seq"] for each in self._good("snapshots")}
        live = [run["run_id"] for run in self._good("runs") if run["state"] == "live"]
        with_gap = [run_id for run_id in live if self._has_gap(run_id, covered.get(run_id, -1))]
        return with_gap[0] if len(with_gap) == 1 else None

    def _has_gap(self, run_id: str, after: int) -> bool | None:
        """Return whether a number is missing among the run's ops after that one; None where it has none of them."""
        seqs = {op["seq"] for op in self._good("ops") if op["adapter_id"] == run_id and op["seq"] > after}
        return seqs != set(range(after + 1, max(seqs) + 1)) if seqs else None

    def _copied(self, name: str, row: Row) -> Row | None:
        """Return the row as the copy has it, if it has it whole: by its key, or by all but the damaged part."""
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
        likely = same or [other for other in missing if _differences(other, row) == 1]  # the key itself was hit
        return likely[0] if len(likely) == 1 else None

    def _say(self, subject: str, message: str, tenant_id: str | None = None, run_id: str | None = None) -> None:
        subject, message = _printable(subject), _printable(message)
        _logger.error("damaged: %s (tenant %s): %s", subject, tenant_id or "unknown", message)
        whole = message if message.startswith(subject) or ":" in message else f"{subject}: {message}"
        self.entries.append(Damage(subject, whole, time.time(), tenant_id, run_id))


def _key(table: str) -> tuple[str, ...]:
    """Return the columns by which a row is found."""
    return tuple(column.name for column in METADATA.tables[table].primary_key)


def _nearest(value: object, known: Iterable[str]) -> str | None:
    """Return the id that is meant: the same, or the only one that differs least, in one or two characters."""
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
    """Return the columns that ``otherwise`` names, as the damaged row has them, or from there where it has nonsense.

    A value must have the type of the other one; JSON text must hold an object, with the same names if there are any.
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
