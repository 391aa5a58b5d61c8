"""The base class of all areas of the state, and decorators for methods that run as one write or one read."""

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Select, Table
from sqlalchemy.sql.dml import UpdateBase

from twinkle.server.state.database.database import Cursor, Database, Page, Row
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.errors import Refusal

A = TypeVar("A", bound="Area")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Area:
    """A group of tables with the methods that use them.

    Each method here that writes is a transaction of its own; each that reads runs in a reader thread, without one.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _find(self, mapper: RecordMapper[R], **key: object) -> R | None:
        """Return the record with these values in these columns, or None."""
        return await self._database.read(lambda cursor: mapper.find(cursor, **key))

    async def _all(self, mapper: RecordMapper[R], statement: Select[Any], **parameters: object) -> tuple[R, ...]:
        return await self._database.read(lambda cursor: mapper.all(cursor, statement, **parameters))

    async def _page(
        self, mapper: RecordMapper[R], listing: Select[Any], count: Select[Any], **parameters: object
    ) -> Page[R]:
        """Return the records of ``listing``, a query with a limit, and the number of all records from ``count``."""
        return await self._database.read(
            lambda cursor: Page(mapper.all(cursor, listing, **parameters), cursor.number(count, parameters))
        )

    async def _rows(self, statement: Select[Any], **parameters: object) -> list[Row]:
        return await self._database.read(lambda cursor: cursor.rows(statement, parameters))

    async def _number(self, statement: Select[Any], **parameters: object) -> int:
        return await self._database.read(lambda cursor: cursor.number(statement, parameters))

    async def _update(self, table: Table, key: Row, **values: object) -> int:
        """Set ``values`` in the rows with this key; return the number of rows."""
        return await self._database.write(lambda cursor: cursor.update(table, key, **values))

    async def _execute(self, statement: UpdateBase, **parameters: object) -> int:
        """Run a statement; return the number of rows it changed."""
        return await self._database.write(lambda cursor: cursor.execute(statement, parameters))

    async def _execute_many(self, statement: UpdateBase, parameters: Sequence[Row]) -> int:
        """Run a statement once for each set of parameters, in one transaction; return the number of rows changed."""
        return await self._database.write(lambda cursor: cursor.execute_many(statement, parameters))


def in_write(
    method: Callable[Concatenate[A, Cursor, P], T | Refusal],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """Turn a method of an area into a coroutine whose body runs as one transaction in the database's writer thread.

    The body may run several times; only the last run has an effect (see :meth:`Database.write`). Callers do not pass
    ``cursor``.
    """

    @wraps(method)
    async def write(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.write(lambda cursor: method(self, cursor, *args, **kwargs))

    return write


def in_read(
    method: Callable[Concatenate[A, Cursor, P], T],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """Turn a method that does not write to the database into a coroutine whose body runs in a reader thread."""

    @wraps(method)
    async def read(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(lambda cursor: method(self, cursor, *args, **kwargs))

    return read
