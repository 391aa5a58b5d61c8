"""A checksum in each row, to find a flipped bit inside a cell: SQLite itself checks only the structure of its file.

The tables ``schema_version`` and, on PostgreSQL, ``writers`` have none. In all others the column ``checksum`` is set
automatically: :func:`with_checksums` adds it to every INSERT and UPDATE when the statement is compiled. On SQLite
Python code computes it, on PostgreSQL an SQL expression.

An UPDATE sets ``checksum XOR sum(old row) XOR sum(new row)``. If the row was damaged before, its checksum is still
wrong after the update, so the damage is not hidden. Rows are not compared with their checksums at every read, but on
SQLite at the start of a server and by ``twinkle-server check-data``, on PostgreSQL at the start of a server with one
process.

The checksum covers the columns in the order of their names, which is the same in a new table and in a migrated one. A
migration that changes the columns of a table has to call :func:`fill_checksums` for it.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Double,
    Insert,
    MetaData,
    Select,
    String,
    Table,
    Text,
    Update,
    bindparam,
    cast,
    func,
    literal,
)
from sqlalchemy.dialects.postgresql import BIT
from sqlalchemy.sql.dml import UpdateBase

CHECKSUM = "checksum"
SQL_FUNCTION = "row_checksum"  # the name of the Python function on connections to SQLite
_DIGITS = 15  # hexadecimal: 60 bits fit a BIGINT


def checked_columns(table: Table) -> list[Column[Any]]:
    """Return the columns that the checksum covers, in order of their names; empty if the table has no checksum."""
    if CHECKSUM not in table.c:
        return []
    return sorted((column for column in table.c if column.name != CHECKSUM), key=lambda column: column.name)


def row_checksum(values: Sequence[object]) -> int:
    """Return the checksum that SQLite rows have, from the values of the :func:`checked_columns`."""
    return zlib.crc32(_TEXTS.encode(values).encode())


# Made once, and without the check for circular references, because this runs three times for every op. Bytes and
# memoryviews become hexadecimal digits.
_TEXTS = json.JSONEncoder(check_circular=False, default=lambda value: value.hex())


def checksum_function(checksum: int, *values: object) -> int:
    """Return the new checksum of an updated row. ``values``: those of the old row, followed by those of the new row."""
    half = len(values) // 2
    if half == 0:
        return checksum
    return checksum ^ row_checksum(values[:half]) ^ row_checksum(values[half:])


def without_checksum(statement: Select[Any]) -> Select[Any]:
    """Return the query without the column ``checksum`` in its result: records have no such field."""
    columns = [column for column in statement.selected_columns if getattr(column, "name", None) != CHECKSUM]
    if len(columns) == len(statement.selected_columns):
        return statement
    return statement.with_only_columns(*columns)


def with_checksums(statement: UpdateBase, dialect: str) -> tuple[UpdateBase, Callable[[Mapping[str, Any]], int] | None]:
    """Return the statement extended to set the checksum, and for an INSERT on SQLite a function, otherwise None.

    A DELETE, and a statement on a table without checksums, is returned as it is.

    The function computes the parameter ``checksum`` from the other parameters before the statement runs. If SQLite
    called the Python function instead, the most frequent statement would take the interpreter lock once more.
    """
    table = statement.table
    columns = checked_columns(table) if isinstance(table, Table) else []
    if not columns or not isinstance(statement, Insert | Update):
        return statement, None
    if isinstance(statement, Insert):
        assert not statement._values, "an INSERT gets all its values as parameters"
        values: dict[str, ColumnElement[Any]] = {column.name: bindparam(column.name) for column in columns}
        if dialect == "sqlite":
            return statement.values({**values, CHECKSUM: bindparam(CHECKSUM)}), _inserted(columns)
        return statement.values({**values, CHECKSUM: expected_checksum(_casts(columns, values))}), None
    given = {getattr(column, "name", column): _reusable(value) for column, value in (statement._values or {}).items()}
    new = _casts(columns, {column.name: given.get(column.name, column) for column in columns})
    if dialect == "sqlite":
        checksum: ColumnElement[int] = getattr(func, SQL_FUNCTION)(table.c[CHECKSUM], *columns, *new)
    else:
        checksum = table.c[CHECKSUM].op("#")(expected_checksum(columns)).op("#")(expected_checksum(new))
    return statement.values({CHECKSUM: checksum}), None


def fill_checksums(connection: Connection, name: str) -> None:
    """Set the checksums of all rows of a table, whatever they were before. For migrations."""
    table = Table(name, MetaData(), autoload_with=connection)
    columns = checked_columns(table)
    checksum: ColumnElement[int] = expected_checksum(columns)
    if connection.dialect.name == "sqlite":
        driver_connection = connection.connection.driver_connection
        assert driver_connection is not None
        driver_connection.create_function("new_row_checksum", -1, lambda *values: row_checksum(values))
        checksum = func.new_row_checksum(*columns)
    connection.execute(table.update().values({CHECKSUM: checksum}))


def _reusable(value: Any) -> Any:
    """Return a value that may occur a second time in the statement.

    A constant becomes a new literal: SQLAlchemy names the parameters of constants after their column, and two with the
    same name would conflict.
    """
    return literal(value.value, value.type) if isinstance(value, BindParameter) and not value.required else value


def _inserted(columns: Sequence[Column[Any]]) -> Callable[[Mapping[str, Any]], int]:
    """Return a function that computes the checksum of a new row from its parameters.

    It uses the values as SQLite will return them: an integer in a DOUBLE column comes back as a float.
    """
    values_of = itemgetter(*(column.name for column in columns))
    doubles = [index for index, column in enumerate(columns) if isinstance(column.type, Double)]

    def checksum(parameters: Mapping[str, Any]) -> int:
        values = list(values_of(parameters))
        for index in doubles:
            if isinstance(values[index], int):
                values[index] = float(values[index])
        return row_checksum(values)

    return checksum


def _casts(columns: Sequence[Column[Any]], values: Mapping[str, ColumnElement[Any]]) -> Sequence[ColumnElement[Any]]:
    """Return the values, cast to the types of their columns."""
    return [
        values[column.name] if values[column.name] is column else cast(values[column.name], column.type)
        for column in columns
    ]


def expected_checksum(values: Sequence[ColumnElement[Any]]) -> ColumnElement[int]:
    """Return the expected checksum of a row as an SQL expression for PostgreSQL."""
    digest = func.md5(cast(func.row(*values), Text))
    digits = literal("x", String).concat(func.left(digest, _DIGITS))
    return cast(cast(digits, BIT(4 * _DIGITS)), BigInteger)
