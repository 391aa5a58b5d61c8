"""The driver of PostgreSQL.

Two advisory locks of the database are used. The server lock is held by the server as long as its writer's connection
lives; if a server has several processes, they share it. The write lock is held by each transaction of a writer, also of
a tool, and by a migration, until its end: so there is one writer at a time, as with SQLite.

A connection can be lost after COMMIT was sent and before its answer arrived. To find out afterwards whether the
transaction was committed, each writer has a row in the table ``writers``, and every transaction stores its own number
in that row. A server with one process deletes the rows of earlier servers when it opens the database. So an earlier
server that was only cut off from the network finds its row missing at its next transaction, and cannot write any more.

PostgreSQL maintains its own structure. A server with one process compares the rows with their checksums when it starts;
one with several processes does not. A damaged row is not repaired. A live run whose own row, snapshot or op is damaged
is failed. All damage that is found is reported in the log and in the table ``damage``.
"""

import errno
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NullPool,
    PoolProxiedConnection,
    create_engine,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError

from twinkle.errors import UserError
from twinkle.server.state.database.driver import Role
from twinkle.server.state.database.tables import DAMAGE, METADATA, RUNS
from twinkle.server.state.errors import (
    Damage,
    DatabaseConnectionError,
    DatabaseInUseError,
    DatabaseUnavailableError,
    StorageFullError,
    lost_run,
)
from twinkle.server.state.integrity.row_checksums import CHECKSUM, checked_columns, expected_checksum, with_checksums

_logger = logging.getLogger(__name__)

_SERVER_LOCK = int.from_bytes(b"twinkle\0")
_WRITE_LOCK = int.from_bytes(b"twinkle\1")

# PostgreSQL needs a moment to notice that the connection of a killed server is gone.
_LOCK_SECONDS = 2.0
_LOCK_PAUSE = 0.05

# READ COMMITTED, whatever the default of the database is: statements after the wait for the lock then see what the
# previous holder of the lock committed.
_BEGIN_WRITE = f"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({_WRITE_LOCK})"

_WRITERS = """
CREATE TABLE IF NOT EXISTS writers (
    writer TEXT NOT NULL PRIMARY KEY,
    is_server INTEGER NOT NULL,
    transactions BIGINT NOT NULL
) WITH (fillfactor = 10)
"""

# With these settings each side notices within half a minute that the other one has disappeared. Times are in seconds,
# tcp_user_timeout in milliseconds.
_CONNECT_DEFAULTS = {
    "application_name": "twinkle-server",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
    "target_session_attrs": "read-write",
}
_SESSION = """
SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
SET idle_in_transaction_session_timeout = '60s'
"""


class PostgresDriver:
    """The driver of one PostgreSQL database. ``role`` decides whether and how its writer takes the server lock."""

    def __init__(self, url: URL, role: Role) -> None:
        self.name = f"{url.database!r} at {url.host or url.query.get('host', 'this machine')}"  # no user, no password
        self._role = role
        self._writer = secrets.token_hex(16)
        self._is_registered = False
        self._number = 0  # number of the last transaction that was begun
        options = {key: value for key, value in _CONNECT_DEFAULTS.items() if key not in url.query}
        self.engine: Engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            paramstyle="format",  # positional parameters, as compiled statements need them
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",  # begin() and commit() send BEGIN and COMMIT themselves
            use_native_hstore=False,
            connect_args=options,
        )
        event.listen(self.engine, "connect", _configure)

    # --- connections --------------------------------------------------------------------------------------------------

    @contextmanager
    def _connecting(self, *failures: type[Exception]) -> Iterator[None]:
        """Convert these errors of the driver to DatabaseConnectionError, which names the database."""
        try:
            yield
        except failures as error:
            raise DatabaseConnectionError(self.name, _reason(error)) from None

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._connecting(DBAPIError), self.engine.connect() as connection:
            yield connection

    def connect_reader(self) -> PoolProxiedConnection:
        with self._connecting(psycopg.Error, DBAPIError):
            return self.engine.raw_connection()

    def connect_writer(self) -> PoolProxiedConnection:
        connection = self.connect_reader()
        try:
            with self._connecting(psycopg.OperationalError):
                cursor = connection.cursor()
                if self._role is not Role.TOOL:
                    shared = "_shared" if self._role is Role.MEMBER else ""
                    self._take_lock(cursor, f"pg_try_advisory_lock{shared}")
                self._register(cursor)
        except BaseException:
            connection.invalidate()
            raise
        return connection

    def _take_lock(self, cursor: Any, function: str) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            cursor.execute(f"SELECT {function}({_SERVER_LOCK})")
            if cursor.fetchone()[0]:
                return
            if time.monotonic() > deadline:
                raise DatabaseInUseError(self.name)
            time.sleep(_LOCK_PAUSE)

    def _register(self, cursor: Any) -> None:
        """Insert this writer's row on the first connection, and require it on later ones.

        If a later connection does not find the row, another server has taken over: DatabaseInUseError.
        """
        if self._is_registered:
            cursor.execute("SELECT FROM writers WHERE writer = %s", [self._writer])
            if cursor.fetchone() is None:
                raise DatabaseInUseError(self.name)
            return
        earlier = "DELETE FROM writers WHERE is_server = 1;" if self._role is Role.SERVER else ""
        row = f"INSERT INTO writers VALUES ('{self._writer}', {int(self._role is not Role.TOOL)}, 0)"
        cursor.execute(f"{_BEGIN_WRITE}; {earlier} {row}; COMMIT")
        self._is_registered = True

    def is_lost(self, connection: PoolProxiedConnection) -> bool:
        driver_connection = connection.driver_connection
        return driver_connection is None or bool(driver_connection.closed)

    def leave(self, cursor: Any) -> None:
        cursor.execute("DELETE FROM writers WHERE writer = %s", [self._writer])

    # --- transactions -------------------------------------------------------------------------------------------------

    def begin(self, cursor: Any) -> None:
        """Begin a transaction and store its number in the writer's row, in one round trip.

        Raises DatabaseInUseError if the row is gone: another server has taken over.
        """
        self._number += 1
        number = f"UPDATE writers SET transactions = {self._number} WHERE writer = '{self._writer}'"
        cursor.execute(f"{_BEGIN_WRITE}; {number}", prepare=False)
        while cursor.nextset():  # skip to the result of the last statement, the UPDATE
            pass
        if cursor.rowcount != 1:
            raise DatabaseInUseError(self.name)

    def commit(self, cursor: Any) -> None:
        cursor.execute("COMMIT")
        # If a statement of the transaction failed, COMMIT rolls back without raising an error.
        assert cursor.statusmessage == "COMMIT", cursor.statusmessage

    def is_committed(self, cursor: Any) -> bool:
        # The lost transaction holds the write lock until it ends. Once this one has the lock, the number is stored or
        # never will be.
        cursor.execute(f"{_BEGIN_WRITE}; SELECT transactions FROM writers WHERE writer = '{self._writer}'")
        while cursor.nextset():
            pass
        row = cursor.fetchone()
        cursor.execute("COMMIT")
        return row is not None and row[0] == self._number

    def begin_migration(self, connection: Connection) -> None:
        """Begin a transaction; DatabaseInUseError if a server uses the database, which would expect the old tables."""
        cursor = connection.connection.cursor()
        cursor.execute(_BEGIN_WRITE)
        self._take_lock(cursor, "pg_try_advisory_xact_lock")

    def finish_migration(self, connection: Connection) -> None:
        connection.exec_driver_sql(_WRITERS)
        connection.commit()

    def typed(self, error: Exception) -> Exception:
        if isinstance(error, psycopg.errors.DiskFull):
            return StorageFullError(errno.ENOSPC, f"the database's disk is full: {error}")
        if isinstance(error, psycopg.DataError) and "NUL" in str(error):
            return UserError("text: got one with the character NUL, allowed: all other characters")
        if isinstance(error, psycopg.OperationalError) and (error.sqlstate or "57P").startswith(("08", "57P")):
            return DatabaseUnavailableError()
        return error

    def fail_damaged_rows(self) -> None:
        with self.connect() as connection:
            for table in METADATA.sorted_tables:
                columns = checked_columns(table)
                if columns:
                    wrong = select(*columns).where(table.c[CHECKSUM] != expected_checksum(columns))
                    for row in connection.execute(wrong).mappings().all():
                        key = ", ".join(str(row[each.name]) for each in table.primary_key)
                        _fail(connection, table.name, dict(row), key)

    def maintain(self, cursor: Any) -> None:
        """Do nothing: PostgreSQL does its own maintenance."""


def _configure(connection: Any, _record: object) -> None:
    connection.execute(_SESSION)


def _reason(error: Exception) -> str:
    """Return the driver's message on one line. Messages of libpq never contain a password."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split())


def _fail(connection: Connection, table: str, row: dict[str, Any], key: str) -> None:
    """Report a damaged row in the log and, the first time, in ``damage``.

    If it is a row of ``runs``, ``snapshots`` or ``ops`` and its run is live, fail the run.
    """
    run_id = row.get("adapter_id") or row.get("run_id")
    what = f"a row of the table {table} ({key}) is damaged in the server's database"
    is_run = table in ("runs", "snapshots", "ops")
    message = lost_run(run_id, what) if is_run else what
    if is_run:
        change = (
            update(RUNS).where(RUNS.c.run_id == run_id, RUNS.c.state == "live").values(state="failed", note=message)
        )
        connection.execute(with_checksums(change, connection.dialect.name)[0])
    subject = f"run {run_id}" if is_run else f"row of {table} {key}"
    _logger.error("damaged: %s (tenant %s): %s", subject, row.get("tenant_id", "unknown"), message)
    if connection.execute(select(DAMAGE.c.subject).where(DAMAGE.c.subject == subject)).first() is None:
        damage = Damage(subject, message, time.time(), row.get("tenant_id"), run_id)
        connection.execute(with_checksums(insert(DAMAGE), connection.dialect.name)[0], vars(damage))
