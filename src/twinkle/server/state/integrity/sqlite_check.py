"""The check of a SQLite database: its structure, its schema, and the checksums of its rows.

``PRAGMA integrity_check`` reads every page and compares every index with its table. It cannot find a bit that flipped
inside a cell; the checksums of rows do that. Both together take about a second for 100 MB.
"""

import json
import re
import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.server.state.integrity.row_checksums import CHECKSUM, row_checksum

_MOST_COMPLAINTS = 200
_BUSY_SECONDS = 30.0  # how long to wait for a server that is writing
# Messages of integrity_check about an index that does not match its table. The index can be rebuilt from the table.
_ABOUT_INDEX = re.compile(
    r"row \d+ missing from index|wrong # of entries in index|non-unique entry in index|rowid not at end-of-record"
)
# Messages about the content of one row. The checksum of that row is wrong too.
_ABOUT_ROW = re.compile(r"\w+ value in \w+\.\w+$|row not in PRIMARY KEY order for|non-\w+ value in")


@dataclass(frozen=True)
class Structure:
    """Damage other than in single rows.

    ``broken``: a message about damage that cannot be repaired, or None. ``indexes``: an index is damaged; indexes can
    be rebuilt.
    """

    broken: str | None
    indexes: bool


@dataclass(frozen=True)
class Contents:
    """The rows of a table: ``good`` ones have the right checksum, ``damaged`` ones do not."""

    columns: tuple[str, ...]
    good: list[dict[str, Any]]
    damaged: list[dict[str, Any]]


def connect(database: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a database for inspection. Text that is no longer valid UTF-8 can still be read."""
    mode = "ro" if read_only else "rw"
    address = f"{database.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
    connection.text_factory = _lenient
    return connection


def check_structure(connection: sqlite3.Connection) -> Structure:
    """Check all pages, indexes and the schema. Reads the whole file."""
    try:
        rows = connection.execute(f"PRAGMA integrity_check({_MOST_COMPLAINTS})").fetchall()
        wrong_schema = _schema_problem(connection)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the message of SQLite may contain damaged text
        return Structure(str(error), indexes=False)
    complaints = [str(row[0]) for row in rows if row[0] != "ok"]
    others = [text for text in complaints if not _ABOUT_INDEX.search(text) and not _ABOUT_ROW.search(text)]
    if wrong_schema is not None:
        others.append(wrong_schema)
    indexes = any(_ABOUT_INDEX.search(text) for text in complaints)
    return Structure(" ".join(others[0].split()) if others else None, indexes)


def row_tables(connection: sqlite3.Connection) -> list[str]:
    """Return the names of the tables whose rows have a checksum."""
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return [name for name in names if CHECKSUM in {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}]


def read_table(connection: sqlite3.Connection, table: str) -> Contents:
    """Read all rows without using an index, because an index may be damaged."""
    cursor = connection.execute(f"SELECT * FROM {table} NOT INDEXED")
    contents = Contents(tuple(column[0] for column in cursor.description), [], [])
    for row, is_good in _compared(cursor):
        (contents.good if is_good else contents.damaged).append(row)
    return contents


def is_whole(connection: sqlite3.Connection, structure: Structure) -> bool:
    """Return whether nothing is damaged: neither the structure nor a row of a table with checksums."""
    if structure.broken is not None or structure.indexes:
        return False
    cursors = (connection.execute(f"SELECT * FROM {table} NOT INDEXED") for table in row_tables(connection))
    return all(is_good for cursor in cursors for _, is_good in _compared(cursor))


def set_schema_sum(connection: Any) -> None:
    """Store a checksum of the schema in ``user_version``, a number in the file's header that applications may use."""
    connection.execute(f"PRAGMA user_version = {_schema_sum(connection)}")


def _schema_problem(connection: sqlite3.Connection) -> str | None:
    noted = connection.execute("PRAGMA user_version").fetchone()[0]
    if noted in (0, _schema_sum(connection)):
        return None
    return "the definitions of its tables are not as they were written"


def _schema_sum(connection: Any) -> int:
    schema = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()
    version = connection.execute("SELECT version FROM schema_version").fetchall()
    content = json.dumps([[list(row) for row in schema], [list(row) for row in version]], default=str)
    return zlib.crc32(content.encode(errors="surrogateescape")) & 0x7FFFFFFF or 1


def _compared(cursor: sqlite3.Cursor) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield every row, and whether its checksum is right."""
    columns = [column[0] for column in cursor.description]
    order = [columns.index(name) for name in sorted(columns) if name != CHECKSUM]
    place = columns.index(CHECKSUM)
    for row in cursor:
        yield dict(zip(columns, row, strict=True)), row_checksum([row[index] for index in order]) == row[place]


def _lenient(data: bytes) -> str:
    return data.decode(errors="surrogateescape")
