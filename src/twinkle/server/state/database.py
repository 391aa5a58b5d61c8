"""One writer thread with group commit, a few reader threads, and statements compiled once.

Why not SQLAlchemy's asyncio engine: it hops to the driver's thread and back for every statement, and runs SQLAlchemy
itself on the event loop. Accepting one op (look up, insert, write the body, commit) on two cores:

                                                   one, p50   300 at once   300 at once, busy loop [1]
    asyncio engine, aiosqlite                       0.63 ms         60 ms                    1504 ms
    SQLAlchemy Core in one thread                   0.16 ms         29 ms                      58 ms
    compiled once, driver's cursor in one thread    0.05 ms          7 ms                    6-29 ms

    [1] the event loop works in slices of 0.5 ms: whoever gives up the interpreter lock waits to get it back

So SQLAlchemy declares the tables, writes the SQL for the dialect and opens the connections; statements run on the
driver's cursor. A caller hands a function to the writer's queue; the thread takes all functions that wait, runs them in
one transaction, commits, and wakes their callers with a single call into the event loop. Commits happen in the order of
the calls.
"""

import asyncio
import errno
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import URL, Engine, PoolProxiedConnection, Select
from sqlalchemy.sql.dml import UpdateBase

from twinkle.server.state import sqlite
from twinkle.server.state.errors import StorageFullError, StoreClosedError

__all__ = ["Cursor", "Database", "Page", "Row"]

T = TypeVar("T")
Row = dict[str, Any]
Statement = Select[Any] | UpdateBase
Parameters = Mapping[str, object]

_GROUP = 512  # most writes of one transaction
_READERS = 4
_CHECKPOINT_WRITES = 256  # each changes a few pages of 4 KiB

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list, and how long the list is."""

    items: tuple[T, ...]
    total: int


@dataclass(frozen=True)
class _Compiled:
    sql: str
    names: tuple[str, ...]  # of the parameters, in order
    constants: Parameters  # those that are part of the statement
    columns: tuple[str, ...]  # of the result

    def values(self, parameters: Parameters) -> list[object]:
        if self.constants:
            parameters = {**parameters, **self.constants}
        return [parameters[name] for name in self.names]


class Cursor:
    """Runs statements in the transaction of whoever was given it."""

    def __init__(self, driver_cursor: Any, engine: Engine, compiled: dict[Statement, _Compiled]) -> None:
        self.driver_cursor = driver_cursor
        self._engine = engine
        self._compiled = compiled

    def rows(self, statement: Select[Any], parameters: Parameters) -> list[Row]:
        compiled = self._compile(statement)
        self.driver_cursor.execute(compiled.sql, compiled.values(parameters))
        return [dict(zip(compiled.columns, row, strict=True)) for row in self.driver_cursor.fetchall()]

    def row(self, statement: Select[Any], parameters: Parameters) -> Row | None:
        """The only row, if there is one."""
        rows = self.rows(statement, parameters)
        return rows[0] if rows else None

    def number(self, statement: Select[Any], parameters: Parameters) -> int:
        """The only value of the only row."""
        row = self.row(statement, parameters)
        assert row is not None
        return int(next(iter(row.values())))

    def execute(self, statement: UpdateBase, parameters: Parameters) -> int:
        """The number of rows it changed."""
        compiled = self._compile(statement)
        self.driver_cursor.execute(compiled.sql, compiled.values(parameters))
        return int(self.driver_cursor.rowcount)

    def execute_many(self, statement: UpdateBase, parameters: Iterable[Parameters]) -> int:
        """The number of rows they changed together."""
        compiled = self._compile(statement)
        self.driver_cursor.executemany(compiled.sql, [compiled.values(each) for each in parameters])
        return int(self.driver_cursor.rowcount)

    def command(self, sql: str) -> None:
        """Transaction control."""
        self.driver_cursor.execute(sql)

    def _compile(self, statement: Statement) -> _Compiled:
        known = self._compiled.get(statement)
        if known is None:
            known = self._compiled[statement] = _compile(statement, self._engine)
        return known


def _compile(statement: Statement, engine: Engine) -> _Compiled:
    compiled = statement.compile(dialect=engine.dialect)
    assert compiled.positiontup is not None, "a dialect with named parameters needs its own branch here"
    return _Compiled(
        sql=str(compiled),
        names=tuple(compiled.positiontup),
        constants={name: bind.value for bind, name in compiled.bind_names.items() if not bind.required},
        columns=tuple(statement.selected_columns.keys()) if isinstance(statement, Select) else (),
    )


@dataclass(frozen=True)
class _Write:
    work: Callable[[Cursor], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Database:
    """The connections. Made in any thread (it blocks), used from one event loop."""

    def __init__(self, url: URL, loop: asyncio.AbstractEventLoop) -> None:
        self.transactions = 0  # committed by the writer
        self._writes = 0  # since the last checkpoint
        self._loop = loop
        self._engine = sqlite.open_engine(url)
        self._compiled: dict[Statement, _Compiled] = {}
        self._connections = [self._engine.raw_connection() for _ in range(1 + _READERS)]
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="state-reader")
        self._idle: queue.SimpleQueue[Cursor] = queue.SimpleQueue()  # one for each reader
        for connection in self._connections[1:]:
            self._idle.put(self._cursor(connection))
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._write_groups, name="state-writer", daemon=True)
        self._writer.start()

    async def read(self, work: Callable[[Cursor], T]) -> T:
        """Run ``work`` in a reader's thread. It sees every write that was awaited before."""
        self._check_open()
        return await self._loop.run_in_executor(self._readers, self._read, work)

    async def write(self, work: Callable[[Cursor], T]) -> T:
        """Run ``work`` in the writer's thread and return when it is committed.

        If it raises, what it wrote is undone and the error is this caller's alone. It may be run twice, the first time
        without effect on the database. A caller that is cancelled stops waiting; its work is done all the same.
        """
        self._check_open()
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Write(work, future))
        return await future

    async def close(self) -> None:
        """Commit what waits and let go of the files."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            await asyncio.to_thread(self._join)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _join(self) -> None:
        self._writer.join()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()
        self._engine.dispose()

    def _cursor(self, connection: PoolProxiedConnection) -> Cursor:
        return Cursor(connection.cursor(), self._engine, self._compiled)

    def _read(self, work: Callable[[Cursor], T]) -> T:
        cursor = self._idle.get()
        try:
            return work(cursor)
        finally:
            self._idle.put(cursor)

    def _write_groups(self) -> None:
        connection = self._connections[0]
        cursor = self._cursor(connection)
        last = False
        while not last:
            group, last = self._next_group()
            if group:
                results = self._commit(group, connection, cursor)
                self._wake(group, results)
                self._maintain(len(group))

    def _next_group(self) -> tuple[list[_Write], bool]:
        """All writes that wait (at least one), and whether the store is being closed."""
        group: list[_Write] = []
        while len(group) < _GROUP:
            try:
                write = self._queue.get(block=not group)
            except queue.Empty:
                break
            if write is None:
                return group, True
            group.append(write)
        return group, False

    def _commit(self, group: Sequence[_Write], connection: PoolProxiedConnection, cursor: Cursor) -> list[Any]:
        """The results in order, failures as :class:`_Failure`: whatever goes wrong is the caller's, as in a pool.

        Hardly ever does one fail. If one does, nothing of the transaction is left, and each gets one of its own.
        """
        try:
            return self._transact(group, connection, cursor)
        except Exception as error:  # noqa: BLE001
            if len(group) == 1:
                return [_Failure(_typed(error))]
        return [result for write in group for result in self._commit([write], connection, cursor)]

    def _transact(self, group: Sequence[_Write], connection: PoolProxiedConnection, cursor: Cursor) -> list[Any]:
        try:
            cursor.command(sqlite.BEGIN_WRITE)
            results = [write.work(cursor) for write in group]
            connection.commit()
        except BaseException:
            with suppress(Exception):  # if the transaction is still there, the next BEGIN fails
                connection.rollback()
            raise
        self.transactions += 1
        return results

    def _wake(self, group: Sequence[_Write], results: Sequence[Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, group, results)

    def _maintain(self, writes: int) -> None:
        """Every now and then, let a reader's thread do what would otherwise delay a commit."""
        self._writes += writes
        if self._writes >= _CHECKPOINT_WRITES:
            self._writes = 0
            self._readers.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        try:
            self._read(lambda cursor: sqlite.checkpoint(cursor.driver_cursor))
        except Exception:  # nothing is lost: the next one does the work of this one
            _logger.exception("checkpointing the database failed")


def _typed(error: Exception) -> Exception:
    if not sqlite.is_disk_full(error):
        return error
    full = StorageFullError(errno.ENOSPC, f"the database's disk is full: {error}")
    full.__cause__ = error
    return full


def _resolve(group: Sequence[_Write], results: Sequence[Any]) -> None:
    for write, result in zip(group, results, strict=True):
        if write.future.done():
            continue
        if isinstance(result, _Failure):
            write.future.set_exception(result.error)
        else:
            write.future.set_result(result)
