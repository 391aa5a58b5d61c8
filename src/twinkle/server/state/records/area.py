"""What all areas of the state share: the queries of one statement, and methods that are one transaction."""

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Select, Table
from sqlalchemy.sql.dml import UpdateBase

from twinkle.errors import QuotaError
from twinkle.server.state.database.database import Cursor, Database, Page, Row
from twinkle.server.state.database.mapper import RecordMapper

A = TypeVar("A", bound="Area")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Area:
    """Some tables of the state with methods of their own. Each of the queries here is a transaction by itself."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _find(self, mapper: RecordMapper[R], **key: object) -> R | None:
        """Return the only record with these values in its columns; None where there is none."""
        return await self._database.read(lambda cursor: mapper.find(cursor, **key))

    async def _all(self, mapper: RecordMapper[R], statement: Select[Any], **parameters: object) -> tuple[R, ...]:
        return await self._database.read(lambda cursor: mapper.all(cursor, statement, **parameters))

    async def _page(
        self, mapper: RecordMapper[R], listing: Select[Any], count: Select[Any], **parameters: object
    ) -> Page[R]:
        """Return the records of ``listing``, which has a limit, and the ``count`` of all that there are."""
        return await self._database.read(
            lambda cursor: Page(mapper.all(cursor, listing, **parameters), cursor.number(count, parameters))
        )

    async def _rows(self, statement: Select[Any], **parameters: object) -> list[Row]:
        return await self._database.read(lambda cursor: cursor.rows(statement, parameters))

    async def _number(self, statement: Select[Any], **parameters: object) -> int:
        return await self._database.read(lambda cursor: cursor.number(statement, parameters))

    async def _update(self, table: Table, key: Row, **values: object) -> int:
        """Set ``values`` in the rows with this key; return how many there are."""
        return await self._database.write(lambda cursor: cursor.update(table, key, **values))

    async def _execute(self, statement: UpdateBase, **parameters: object) -> int:
        """Return the number of rows that were changed."""
        return await self._database.write(lambda cursor: cursor.execute(statement, parameters))

    async def _execute_many(self, statement: UpdateBase, parameters: Sequence[Row]) -> int:
        """Return the number of rows that were changed together."""
        return await self._database.write(lambda cursor: cursor.execute_many(statement, parameters))


def in_write(
    method: Callable[Concatenate[A, Cursor, P], T | QuotaError],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """Make a coroutine of a method of an area whose body is one transaction. It runs in the database's writer thread.

    It may run several times, all but the last without effect (see :meth:`Database.write`).
    """

    @wraps(method)
    async def write(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.write(lambda cursor: method(self, cursor, *args, **kwargs))

    return write


def in_read(
    method: Callable[Concatenate[A, Cursor, P], T],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """Make a coroutine of a method of an area that only reads. It runs in one of the database's reader threads."""

    @wraps(method)
    async def read(self: A, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(lambda cursor: method(self, cursor, *args, **kwargs))

    return read
