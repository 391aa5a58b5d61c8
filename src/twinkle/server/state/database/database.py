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

A connection that is lost is made again, and what ran on it runs again: reads, and transactions that did not take place.
Callers wait that long, up to half a minute; then they hear that the database is unavailable. Only a transaction that
may have taken place or not holds on to its callers until the database can say.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from sqlalchemy import (
    ColumnElement,
    Engine,
    PoolProxiedConnection,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.sql.dml import UpdateBase

from twinkle.errors import QuotaError
from twinkle.server.state.database.driver import Driver
from twinkle.server.state.errors import (
    DatabaseConnectionError,
    DatabaseInUseError,
    DatabaseUnavailableError,
    StoreClosedError,
)
from twinkle.server.state.integrity.row_checksums import CHECKSUM, with_checksums, without_checksum

T = TypeVar("T")
Row = dict[str, Any]
Statement = Select[Any] | UpdateBase
Parameters = Mapping[str, object]

_GROUP = 512  # most writes of one transaction
_READERS = 4
_MAINTENANCE_WRITES = 256  # each changes a few pages of 4 KiB
_OUTAGE_SECONDS = 30.0  # how long callers wait for a database that is away
_RECONNECT_PAUSE = 0.2
_ATTEMPTS = 3  # of something on whose way the connection is lost each time

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
    checksum: Callable[[Parameters], int] | None = None  # computes the parameter of that name from the others

    def values(self, parameters: Parameters) -> list[object]:
        if self.constants:
            parameters = {**parameters, **self.constants}
        if self.checksum is not None:
            parameters = {**parameters, CHECKSUM: self.checksum(parameters)}
        return [parameters[name] for name in self.names]


class Cursor:
    """Runs statements in one transaction. It belongs to the function that was given it, in that function's thread."""

    def __init__(self, driver_cursor: Any, engine: Engine, compiled: dict[Statement, _Compiled]) -> None:
        self.driver_cursor = driver_cursor
        self._engine = engine
        self._compiled = compiled

    def rows(self, statement: Select[Any], parameters: Parameters) -> list[Row]:
        compiled = self._compile(statement)
        self.driver_cursor.execute(compiled.sql, compiled.values(parameters))
        return [dict(zip(compiled.columns, row, strict=True)) for row in self.driver_cursor.fetchall()]

    def row(self, statement: Select[Any], parameters: Parameters) -> Row | None:
        """Return the only row, or None where there is none."""
        rows = self.rows(statement, parameters)
        return rows[0] if rows else None

    def number(self, statement: Select[Any], parameters: Parameters) -> int:
        """Return the only value of the only row."""
        row = self.row(statement, parameters)
        assert row is not None
        return int(next(iter(row.values())))

    def execute(self, statement: UpdateBase, parameters: Parameters) -> int:
        """Run a statement; returns the number of rows it changed."""
        compiled = self._compile(statement)
        self.driver_cursor.execute(compiled.sql, compiled.values(parameters))
        return int(self.driver_cursor.rowcount)

    def execute_many(self, statement: UpdateBase, parameters: Iterable[Parameters]) -> int:
        """Run a statement once for each set of parameters; returns the number of rows they changed together."""
        compiled = self._compile(statement)
        self.driver_cursor.executemany(compiled.sql, [compiled.values(each) for each in parameters])
        return int(self.driver_cursor.rowcount)

    # Statements about the rows of one table that have certain values in certain columns:

    def find(self, table: Table, **key: object) -> Row | None:
        """Return the only row with these values, or None where there is none."""
        return self.row(_find(table, tuple(key)), key)

    def count(self, table: Table, **key: object) -> int:
        return self.number(_count(table, tuple(key)), key)

    def insert(self, table: Table, **row: object) -> None:
        """Insert a row, which has a value for every column."""
        self.execute(_insert(table), row)

    def update(self, table: Table, key: Parameters, **values: object) -> int:
        """Set ``values`` in the rows with this key; returns how many there are."""
        wanted = {f"its_{name}": value for name, value in key.items()}
        return self.execute(_update(table, tuple(key), tuple(values)), wanted | values)

    def delete(self, table: Table, **key: object) -> int:
        """Delete the rows with these values; returns how many there were."""
        return self.execute(_delete(table, tuple(key)), key)

    def _compile(self, statement: Statement) -> _Compiled:
        known = self._compiled.get(statement)
        if known is None:
            known = self._compiled[statement] = _compile(statement, self._engine)
        return known


# Each is made once for a table and the names of columns: statements are compiled by identity.


@cache
def _find(table: Table, key: tuple[str, ...]) -> Select[Any]:
    return select(table).where(*_equal(table, key))


@cache
def _count(table: Table, key: tuple[str, ...]) -> Select[Any]:
    return select(func.count()).select_from(table).where(*_equal(table, key))


_insert = cache(insert)


@cache
def _update(table: Table, key: tuple[str, ...], values: tuple[str, ...]) -> UpdateBase:
    """Make an UPDATE. Parameters of the key have names of their own: SQLAlchemy names values after their columns."""
    return update(table).where(*_equal(table, key, "its_")).values({name: bindparam(name) for name in values})


@cache
def _delete(table: Table, key: tuple[str, ...]) -> UpdateBase:
    return delete(table).where(*_equal(table, key))


def _equal(table: Table, names: tuple[str, ...], prefix: str = "") -> list[ColumnElement[bool]]:
    return [table.c[name] == bindparam(f"{prefix}{name}") for name in names]


def _compile(statement: Statement, engine: Engine) -> _Compiled:
    checksum = None
    if isinstance(statement, Select):
        statement = without_checksum(statement)
    else:
        statement, checksum = with_checksums(statement, engine.dialect.name)
    compiled = statement.compile(dialect=engine.dialect)
    assert compiled.positiontup is not None, "a dialect with named parameters needs its own branch here"
    return _Compiled(
        sql=str(compiled),
        names=tuple(compiled.positiontup),
        constants={name: bind.value for bind, name in compiled.bind_names.items() if not bind.required},
        columns=tuple(statement.selected_columns.keys()) if isinstance(statement, Select) else (),
        checksum=checksum,
    )


@dataclass(frozen=True)
class _Write:
    work: Callable[[Cursor], Any]
    future: asyncio.Future[Any]


class _Line:
    """A connection and the cursor on it, both made anew when they were lost."""

    def __init__(self, connect: Callable[[], PoolProxiedConnection], cursor: Callable[[Any], Cursor]) -> None:
        self._connect = connect
        self._cursor = cursor
        self._open()

    def connect_again(self) -> None:
        if self.connection.is_valid:
            self.connection.invalidate()  # a lost one that is merely dropped is a complaint in the log
        self._open()

    def _open(self) -> None:
        self.connection = self._connect()
        self.cursor = self._cursor(self.connection.cursor())


class Database:
    """The connections. Made in any thread (it blocks), used from one event loop."""

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        self.transactions = 0  # committed by the writer
        self._writes = 0  # since the last maintenance
        self._away_since: float | None = None  # the database
        self._is_missed = False  # for longer than callers wait
        self._loop = loop
        self._driver = driver
        self._compiled: dict[Statement, _Compiled] = {}
        self._idle: queue.SimpleQueue[_Line] = queue.SimpleQueue()  # one for each reader
        for _ in range(_READERS):
            self._idle.put(_Line(driver.connect_reader, self._cursor))
        self._written = _Line(driver.connect_writer, self._cursor)  # last: it may hold a lock on the database
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="state-reader")
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._write_groups, name="state-writer", daemon=True)
        self._writer.start()

    async def read(self, work: Callable[[Cursor], T]) -> T:
        """Run ``work`` in a reader's thread, again if its connection is lost. It sees all writes awaited before."""
        self._check_open()
        return await self._loop.run_in_executor(self._readers, self._read, work)

    async def write(self, work: Callable[[Cursor], T | QuotaError]) -> T:
        """Run ``work`` in the writer's thread and return when it is committed.

        If it raises, what it wrote is undone and the error is this caller's alone. It may be run several times, all but
        the last without effect on the database. A caller that is cancelled stops waiting; its work is done all the
        same. A QuotaError that ``work`` returns is raised here: raised there, it would have the transaction, which
        other callers share, done again.
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
        with suppress(Exception):  # a database that is away hears it from the next writer
            self._driver.leave(self._written.cursor.driver_cursor)
        for line in (self._written, *(self._idle.get() for _ in range(_READERS))):
            if line.connection.is_valid and self._driver.is_lost(line.connection):
                line.connection.invalidate()
            line.connection.close()
        self._driver.engine.dispose()

    def _cursor(self, driver_cursor: Any) -> Cursor:
        return Cursor(driver_cursor, self._driver.engine, self._compiled)

    def _read(self, work: Callable[[Cursor], T]) -> T:
        line = self._idle.get()
        attempts = 0
        try:
            while True:
                attempts += 1
                try:
                    return work(line.cursor)
                except Exception as error:
                    if self._driver.is_lost(line.connection):
                        self._reconnect(line, error)
                        if attempts < _ATTEMPTS:
                            continue
                    typed = self._typed(error)
                    if typed is error:
                        raise
                    raise typed from error
        finally:
            self._idle.put(line)

    def _write_groups(self) -> None:
        last = False
        while not last:
            group, last = self._next_group(_GROUP)
            if group:
                results = self._commit(group)
                self._wake(group, results)
                self._maintain(len(group))

    def _next_group(self, most: int | None = None) -> tuple[list[_Write], bool]:
        """Return the writes that wait, and whether the store is being closed.

        With ``most``, not more than so many, and at least one: it waits for the first. Otherwise all, perhaps none.
        """
        group: list[_Write] = []
        with suppress(queue.Empty):
            while most is None or len(group) < most:
                write = self._queue.get(block=most is not None and not group)
                if write is None:
                    return group, True
                group.append(write)
        return group, False

    def _commit(self, group: Sequence[_Write]) -> list[Any]:
        """Return the results in order. One that is an exception is raised by the caller whose write it was.

        Hardly ever does one fail. If one does, nothing of the transaction is left, and each gets one of its own.
        """
        try:
            return self._transact(group)
        except (DatabaseInUseError, DatabaseUnavailableError) as error:  # nobody's own fault
            return [error] * len(group)
        except Exception as error:  # noqa: BLE001
            if len(group) == 1:
                return [self._typed(error)]
        return [result for write in group for result in self._commit([write])]

    def _transact(self, group: Sequence[_Write]) -> list[Any]:
        attempts = 0
        while True:
            attempts += 1
            line, results = self._written, None
            try:
                self._driver.begin(line.cursor.driver_cursor)
                results = [write.work(line.cursor) for write in group]
                self._driver.commit(line.cursor.driver_cursor)
            except BaseException as error:
                if not self._driver.is_lost(line.connection):
                    with suppress(Exception):  # if the transaction is still there, the next BEGIN fails
                        line.connection.rollback()
                    raise
                # With results, the commit was under way.
                if not self._took_place(error, results is not None):
                    if attempts == _ATTEMPTS:
                        raise
                    continue
            assert results is not None
            self.transactions += 1
            return results

    def _took_place(self, error: BaseException, maybe: bool) -> bool:
        """Connect again, and say whether the transaction that lost its connection was committed; ``maybe`` it was."""
        while True:
            try:
                self._reconnect(self._written, error)
                return maybe and self._driver.is_committed(self._written.cursor.driver_cursor)
            except DatabaseUnavailableError as unavailable:
                if not maybe or self._closed:
                    raise
                self._refuse_waiting(unavailable)
            except DatabaseInUseError:
                raise
            except Exception as again:
                if not self._driver.is_lost(self._written.connection):
                    raise
                error = again

    def _refuse_waiting(self, error: DatabaseUnavailableError) -> None:
        refused, is_closing = self._next_group()
        if is_closing:
            self._queue.put(None)
        self._wake(refused, [error] * len(refused))
        time.sleep(_RECONNECT_PAUSE)

    def _reconnect(self, line: _Line, error: BaseException) -> None:
        """Connect until it works, or until the database has been away for too long: then once."""
        since = self._away_since
        if since is None:
            since = self._away_since = time.monotonic()
            _logger.warning("lost the connection to the database: %s", " ".join(str(error).split()))
        while True:
            try:
                line.connect_again()
                break
            except DatabaseInUseError:
                if time.monotonic() - since > _OUTAGE_SECONDS:
                    raise
            except DatabaseConnectionError as reason:
                if time.monotonic() - since > _OUTAGE_SECONDS:
                    if not self._is_missed:
                        _logger.error("callers are turned away: %s", reason)
                    self._is_missed = True
                    raise DatabaseUnavailableError from reason
            time.sleep(_RECONNECT_PAUSE)
        if self._away_since is not None:
            self._away_since, self._is_missed = None, False
            _logger.warning("the database is back after %.1f s", time.monotonic() - since)

    def _typed(self, error: Exception) -> Exception:
        typed = self._driver.typed(error)
        if typed is not error:
            typed.__cause__ = error
        return typed

    def _wake(self, group: Sequence[_Write], results: Sequence[Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, group, results)

    def _maintain(self, writes: int) -> None:
        """After every few hundred writes, let a reader's thread do what would otherwise delay a commit."""
        self._writes += writes
        if self._writes >= _MAINTENANCE_WRITES:
            self._writes = 0
            self._readers.submit(self._maintain_now)

    def _maintain_now(self) -> None:
        try:
            self._read(lambda cursor: self._driver.maintain(cursor.driver_cursor))
        except Exception:  # nothing is lost: the next one does the work of this one
            _logger.exception("maintenance of the database failed")


def _resolve(group: Sequence[_Write], results: Sequence[Any]) -> None:
    for write, result in zip(group, results, strict=True):
        if write.future.done():
            continue
        if isinstance(result, BaseException):
            write.future.set_exception(result)
        else:
            write.future.set_result(result)
