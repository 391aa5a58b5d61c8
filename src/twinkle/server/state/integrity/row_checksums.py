"""A checksum in every row, so that a flipped bit inside a cell is found: SQLite looks at its structure only.

The column ``checksum`` is filled by the statements themselves: :func:`with_checksums` rewrites an INSERT or UPDATE when
it is compiled, so nobody has to think of it. On SQLite a function of ours computes it, on PostgreSQL an expression.

An UPDATE sets ``checksum XOR sum(old row) XOR sum(new row)``: in a row that was damaged before, the damage stays
visible. A row is compared at the start of a server and by ``twinkle-server check-data``, not at every read.

Columns are taken in the order of their names, which is the same in a new table and in one that was migrated. A
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
SQL_FUNCTION = "row_checksum"  # of connections to SQLite
_DIGITS = 15  # hexadecimal: 60 bits fit a BIGINT


def checked_columns(table: Table) -> list[Column[Any]]:
    """Return the columns that the checksum covers, in its order; none if the table has no checksum."""
    if CHECKSUM not in table.c:
        return []
    return sorted((column for column in table.c if column.name != CHECKSUM), key=lambda column: column.name)


def row_checksum(values: Sequence[object]) -> int:
    """Return the checksum of the values of :func:`checked_columns`, on SQLite."""
    return zlib.crc32(_TEXTS.encode(values).encode())


# Made once, and without the check for lists inside themselves: every op comes here three times. Bytes and memoryviews
# become hexadecimal digits.
_TEXTS = json.JSONEncoder(check_circular=False, default=lambda value: value.hex())


def checksum_function(checksum: int, *values: object) -> int:
    """Return the new checksum of a row: ``values`` are those of the old row and those of the new one."""
    half = len(values) // 2
    if half == 0:
        return checksum
    return checksum ^ row_checksum(values[:half]) ^ row_checksum(values[half:])


def without_checksum(statement: Select[Any]) -> Select[Any]:
    """Leave the checksum out of what a query returns: records have no such field."""
    columns = [column for column in statement.selected_columns if getattr(column, "name", None) != CHECKSUM]
    if len(columns) == len(statement.selected_columns):
        return statement
    return statement.with_only_columns(*columns)


def with_checksums(statement: UpdateBase, dialect: str) -> tuple[UpdateBase, Callable[[Mapping[str, Any]], int] | None]:
    """Return the statement that sets the checksum too.

    The second value computes the parameter ``checksum`` from the others, for an INSERT on SQLite: calling back from
    there would take the interpreter lock once more in the hottest statement of all.
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
    """Set the checksums of all rows of a table, whatever they were. For migrations."""
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
    """Return what may stand in a second place of the statement: SQLAlchemy names constants after their column."""
    return literal(value.value, value.type) if isinstance(value, BindParameter) and not value.required else value


def _inserted(columns: Sequence[Column[Any]]) -> Callable[[Mapping[str, Any]], int]:
    """Return what computes the checksum of a new row, of values as they come back: a DOUBLE makes integers floats."""
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
    """Return values as their columns will store them."""
    return [
        values[column.name] if values[column.name] is column else cast(values[column.name], column.type)
        for column in columns
    ]


def expected_checksum(values: Sequence[ColumnElement[Any]]) -> ColumnElement[int]:
    """Return what a row's checksum should be, as an expression of PostgreSQL."""
    digest = func.md5(cast(func.row(*values), Text))
    digits = literal("x", String).concat(func.left(digest, _DIGITS))
    return cast(cast(digits, BIT(4 * _DIGITS)), BigInteger)
