"""Access to the database: one writer thread with group commit, a few reader threads, and statements compiled once.

SQLAlchemy's asyncio engine is not used, because it switches to the driver's thread and back for every statement, and
runs SQLAlchemy itself on the event loop. Accepting one op (look up, insert, write the body, commit) takes on two cores:

                                                   one, p50   300 at once   300 at once, busy loop [1]
    asyncio engine, aiosqlite                       0.63 ms         60 ms                    1504 ms
    SQLAlchemy Core in one thread                   0.16 ms         29 ms                      58 ms
    compiled once, driver's cursor in one thread    0.05 ms          7 ms                    6-29 ms

    [1] the event loop works in slices of 0.5 ms: a thread that releases the interpreter lock waits to get it back

So SQLAlchemy declares the tables, compiles the SQL for the dialect and opens the connections; statements run on the
driver's cursor. A caller puts a function into the writer's queue. The writer thread takes the functions that are in the
queue, up to 512, runs them in one transaction, commits, and wakes their callers with a single call into the event loop.
Writes are committed in the order of the calls.

When a connection is lost, a new one is opened and the work is run again, three times at most: reads, and transactions
that were not committed. By default callers wait up to half a minute for a connection; then they get
DatabaseUnavailableError. There is one exception: while it is unknown whether a transaction was committed, its callers
wait until the database can be asked, or until the store is closed.
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

from twinkle.server.state.database.driver import Driver
from twinkle.server.state.errors import (
    DatabaseConnectionError,
    DatabaseInUseError,
    DatabaseUnavailableError,
    Refusal,
    StoreClosedError,
)
from twinkle.server.state.integrity.row_checksums import CHECKSUM, with_checksums, without_checksum

T = TypeVar("T")
Row = dict[str, Any]
Statement = Select[Any] | UpdateBase
Parameters = Mapping[str, object]

_GROUP = 512  # most calls of write() that share one transaction
_READERS = 4
_MAINTENANCE_WRITES = 256  # calls of write() between two maintenances; each changes a few pages of 4 KiB
_RECONNECT_PAUSE = 0.2
_ATTEMPTS = 3  # how often work is tried that loses its connection each time

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list, and the length of the whole list."""

    items: tuple[T, ...]
    total: int


@dataclass(frozen=True)
class _Compiled:
    """A statement as SQL text, with what is needed to bind its parameters and to name the columns of its result."""

    sql: str
    names: tuple[str, ...]  # of the parameters, in the order of their placeholders
    constants: Parameters  # parameters whose value is part of the statement
    columns: tuple[str, ...]  # of the result
    checksum: Callable[[Parameters], int] | None = None  # computes the parameter ``checksum`` from the others

    def values(self, parameters: Parameters) -> list[object]:
        if self.constants:
            parameters = {**parameters, **self.constants}
        if self.checksum is not None:
            parameters = {**parameters, CHECKSUM: self.checksum(parameters)}
        return [parameters[name] for name in self.names]


class Cursor:
    """Runs statements on one connection: in a write within its transaction, in a read each statement by itself.

    It is valid only inside the function that it was passed to, and in the thread that runs that function.
    """

    def __init__(self, driver_cursor: Any, engine: Engine, compiled: dict[Statement, _Compiled]) -> None:
        self.driver_cursor = driver_cursor
        self._engine = engine
        self._compiled = compiled

    def rows(self, statement: Select[Any], parameters: Parameters) -> list[Row]:
        compiled = self._compile(statement)
        self.driver_cursor.execute(compiled.sql, compiled.values(parameters))
        return [dict(zip(compiled.columns, row, strict=True)) for row in self.driver_cursor.fetchall()]

    def row(self, statement: Select[Any], parameters: Parameters) -> Row | None:
        """Return the first row, or None if there is none."""
        rows = self.rows(statement, parameters)
        return rows[0] if rows else None

    def number(self, statement: Select[Any], parameters: Parameters) -> int:
        """Return the first value of the first row as an int. There must be a row."""
        row = self.row(statement, parameters)
        assert row is not None
        return int(next(iter(row.values())))

    def execute(self, statement: UpdateBase, parameters: Parameters) -> int:
        """Run a statement; return the number of rows it changed."""
        compiled = self._compile(statement)
        self.driver_cursor.execute(compiled.sql, compiled.values(parameters))
        return int(self.driver_cursor.rowcount)

    def execute_many(self, statement: UpdateBase, parameters: Iterable[Parameters]) -> int:
        """Run a statement once for each set of parameters; return the total number of rows changed."""
        compiled = self._compile(statement)
        self.driver_cursor.executemany(compiled.sql, [compiled.values(each) for each in parameters])
        return int(self.driver_cursor.rowcount)

    # Shortcuts for statements on one table. ``key``: columns and the values that they must have.

    def find(self, table: Table, **key: object) -> Row | None:
        """Return the row with these values, or None. If there are several, return one of them."""
        return self.row(_find(table, tuple(key)), key)

    def count(self, table: Table, **key: object) -> int:
        return self.number(_count(table, tuple(key)), key)

    def insert(self, table: Table, **row: object) -> None:
        """Insert a row. ``row`` must have a value for every column except ``checksum``, which is computed."""
        self.execute(_insert(table), row)

    def update(self, table: Table, key: Parameters, **values: object) -> int:
        """Set ``values`` in the rows with this key; return the number of rows."""
        wanted = {f"its_{name}": value for name, value in key.items()}
        return self.execute(_update(table, tuple(key), tuple(values)), wanted | values)

    def delete(self, table: Table, **key: object) -> int:
        """Delete the rows with these values; return the number of rows."""
        return self.execute(_delete(table, tuple(key)), key)

    def _compile(self, statement: Statement) -> _Compiled:
        known = self._compiled.get(statement)
        if known is None:
            known = self._compiled[statement] = _compile(statement, self._engine)
        return known


# Each statement is made once for a table and a set of columns: compiled statements are looked up by identity.


@cache
def _find(table: Table, key: tuple[str, ...]) -> Select[Any]:
    return select(table).where(*_equal(table, key))


@cache
def _count(table: Table, key: tuple[str, ...]) -> Select[Any]:
    return select(func.count()).select_from(table).where(*_equal(table, key))


_insert = cache(insert)


@cache
def _update(table: Table, key: tuple[str, ...], values: tuple[str, ...]) -> UpdateBase:
    """Make an UPDATE. Parameters of the key get a prefix: SQLAlchemy names those of the values after their columns."""
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
    """One call of :meth:`Database.write` in the writer's queue."""

    work: Callable[[Cursor], Any]
    future: asyncio.Future[Any]


class _Line:
    """A connection to the database and its cursor; :meth:`connect_again` replaces both when the connection is lost."""

    def __init__(self, connect: Callable[[], PoolProxiedConnection], cursor: Callable[[Any], Cursor]) -> None:
        self._connect = connect
        self._cursor = cursor
        self._open()

    def connect_again(self) -> None:
        if self.connection.is_valid:
            self.connection.invalidate()  # without this, SQLAlchemy logs an error about the lost connection
        self._open()

    def _open(self) -> None:
        self.connection = self._connect()
        self.cursor = self._cursor(self.connection.cursor())


class Database:
    """The connections to the database, with the writer thread and the reader threads.

    The constructor blocks and may run in any thread. All public methods belong to the event loop ``loop``.
    ``outage_seconds``: how long callers wait for a database that is unreachable.
    """

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop, outage_seconds: float = 30.0) -> None:
        self._outage_seconds = outage_seconds
        self.transactions = 0  # how many the writer has committed
        self._writes = 0  # calls of write() since the last maintenance
        self._away_since: float | None = None  # since when the database is unreachable; None: it is reachable
        self._is_missed = False  # whether the outage lasts longer than callers wait, and was logged
        self._loop = loop
        self._driver = driver
        self._compiled: dict[Statement, _Compiled] = {}
        self._idle: queue.SimpleQueue[_Line] = queue.SimpleQueue()  # connections of readers that are not in use
        for _ in range(_READERS):
            self._idle.put(_Line(driver.connect_reader, self._cursor))
        self._written = _Line(driver.connect_writer, self._cursor)  # opened last: it may take a lock on the database
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="state-reader")
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._write_groups, name="state-writer", daemon=True)
        self._writer.start()

    async def read(self, work: Callable[[Cursor], T]) -> T:
        """Run ``work`` in a reader's thread, and again, three times at most, if its connection is lost.

        It sees all writes that were awaited before this call.
        """
        self._check_open()
        return await self._loop.run_in_executor(self._readers, self._read, work)

    async def write(self, work: Callable[[Cursor], T | Refusal]) -> T:
        """Run ``work`` in the writer's thread and return its result when it is committed.

        If ``work`` raises, its changes are rolled back and only this caller gets the error. ``work`` may be run several
        times, because a failed transaction is repeated; only the last run has an effect on the database. If the caller
        is cancelled, it stops waiting, but ``work`` is still committed. A Refusal that ``work`` returns is raised to
        the caller. If ``work`` raised it instead, the transaction, which other callers share, would be repeated.
        """
        self._check_open()
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Write(work, future))
        return await future

    async def close(self) -> None:
        """Commit all writes in the queue, end the threads and close the connections."""
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
        with suppress(Exception):  # if the database is unreachable, the next server removes what this one registered
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
        """Run the writer thread: commit groups of writes until the store is closed."""
        last = False
        while not last:
            group, last = self._next_group(_GROUP)
            if group:
                results = self._commit(group)
                self._wake(group, results)
                self._maintain(len(group))

    def _next_group(self, most: int | None = None) -> tuple[list[_Write], bool]:
        """Return writes from the queue, and whether the store is being closed.

        With ``most``, wait for the first write and return at most that many. Without it, return all writes that are in
        the queue, without waiting; there may be none.
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
        """Commit a group and return the results in order. A result that is an exception is raised to its caller.

        Failures are rare. If a write fails, the whole transaction is rolled back, and each write of the group is run
        again in a transaction of its own. If the database is unreachable or taken by another server, every write of
        the group gets that error.
        """
        try:
            return self._transact(group)
        except (DatabaseInUseError, DatabaseUnavailableError) as error:  # not caused by one of the writes
            return [error] * len(group)
        except Exception as error:  # noqa: BLE001
            if len(group) == 1:
                return [self._typed(error)]
        return [result for write in group for result in self._commit([write])]

    def _transact(self, group: Sequence[_Write]) -> list[Any]:
        """Run a group in one transaction. If the connection is lost and nothing was committed, try up to twice more."""
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
                    with suppress(Exception):  # if the rollback fails, the next BEGIN fails too
                        line.connection.rollback()
                    raise
                # If there are results, COMMIT was sent and may have succeeded.
                if not self._took_place(error, results is not None):
                    if attempts == _ATTEMPTS:
                        raise
                    continue
            assert results is not None
            self.transactions += 1
            return results

    def _took_place(self, error: BaseException, maybe: bool) -> bool:
        """Connect again, and return whether the transaction that lost its connection was committed.

        ``maybe``: COMMIT was sent, so the database must be asked, however long it is unreachable, unless the store is
        being closed. Without it, nothing was committed.
        """
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
        """Fail all writes in the queue, so that their callers do not wait for the end of the outage."""
        refused, is_closing = self._next_group()
        if is_closing:
            self._queue.put(None)
        self._wake(refused, [error] * len(refused))
        time.sleep(_RECONNECT_PAUSE)

    def _reconnect(self, line: _Line, error: BaseException) -> None:
        """Try to connect until it works or the outage has lasted too long.

        Then raise DatabaseUnavailableError, or DatabaseInUseError if another server has the database. When the outage
        has lasted too long already, try once.
        """
        since = self._away_since
        if since is None:
            since = self._away_since = time.monotonic()
            _logger.warning("lost the connection to the database: %s", " ".join(str(error).split()))
        while True:
            try:
                line.connect_again()
                break
            except DatabaseInUseError:
                if time.monotonic() - since > self._outage_seconds:
                    raise
            except DatabaseConnectionError as reason:
                if time.monotonic() - since > self._outage_seconds:
                    if not self._is_missed:
                        _logger.error("the database does not answer, requests are refused: %s", reason)
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
        """After every few hundred writes, start maintenance in a reader's thread, where it does not delay commits."""
        self._writes += writes
        if self._writes >= _MAINTENANCE_WRITES:
            self._writes = 0
            self._readers.submit(self._maintain_now)

    def _maintain_now(self) -> None:
        try:
            self._read(lambda cursor: self._driver.maintain(cursor.driver_cursor))
        except Exception:  # nothing is lost: the next maintenance does the same work
            _logger.exception("maintenance of the database failed")


def _resolve(group: Sequence[_Write], results: Sequence[Any]) -> None:
    """Wake the callers of a group. Runs on the event loop."""
    for write, result in zip(group, results, strict=True):
        if write.future.done():
            continue
        if isinstance(result, BaseException):
            write.future.set_exception(result)
        else:
            write.future.set_result(result)
