"""The schema's versions. A new database gets the newest tables at once; an older one is brought forward step by step.

``MIGRATIONS[n]`` leads from version ``n + 1`` to ``n + 2``. A migration works with plain SQL or with tables that it
declares itself, never with those of :mod:`twinkle.server.state.tables`, which go on changing. Never edit one that was
released.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, insert, inspect, select, update

from twinkle.server.state.errors import SchemaVersionError
from twinkle.server.state.tables import METADATA, SCHEMA_VERSION

__all__ = ["MIGRATIONS", "Migration", "migrate", "needs_migration"]

Migration = Callable[[Connection], None]


def _add_sampling_clients(connection: Connection) -> None:
    layout = "WITHOUT ROWID" if connection.dialect.name == "sqlite" else ""
    connection.exec_driver_sql(
        f"""
        CREATE TABLE sampling_clients (
            sampling_session_id VARCHAR NOT NULL REFERENCES sampling_sessions (sampling_session_id),
            client BIGINT NOT NULL,
            first_seq BIGINT NOT NULL,
            next_seq BIGINT NOT NULL,
            PRIMARY KEY (sampling_session_id, client)
        ) {layout}
        """
    )


def _add_audit_and_finish_reasons(connection: Connection) -> None:
    double = "DOUBLE" if connection.dialect.name == "sqlite" else "DOUBLE PRECISION"
    connection.exec_driver_sql(
        f"""
        CREATE TABLE audit (
            entry_id VARCHAR NOT NULL PRIMARY KEY,
            tenant_id VARCHAR NOT NULL,
            at {double} NOT NULL,
            event VARCHAR NOT NULL,
            details TEXT NOT NULL
        )
        """
    )
    connection.exec_driver_sql("CREATE INDEX audit_by_tenant ON audit (tenant_id, at)")
    connection.exec_driver_sql("CREATE INDEX audit_by_time ON audit (at)")
    connection.exec_driver_sql("ALTER TABLE sessions ADD COLUMN finish_reason VARCHAR")
    connection.exec_driver_sql("ALTER TABLE sessions ADD COLUMN finish_detail TEXT")


MIGRATIONS: Sequence[Migration] = (_add_sampling_clients, _add_audit_and_finish_reasons)


def migrate(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the database to the newest version. The caller holds the transaction: all of it happens or nothing."""
    known = 1 + len(migrations)
    version = _version(connection)
    if version is None:
        METADATA.create_all(connection)
        connection.execute(insert(SCHEMA_VERSION).values(version=known))
        return
    if version > known:
        raise SchemaVersionError(version, known)
    for step in migrations[version - 1 :]:
        step(connection)
    connection.execute(update(SCHEMA_VERSION).values(version=known))


def needs_migration(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> bool:
    known = 1 + len(migrations)
    version = _version(connection)
    if version is not None and version > known:
        raise SchemaVersionError(version, known)
    return version != known


def _version(connection: Connection) -> int | None:
    if not inspect(connection).has_table(SCHEMA_VERSION.name):
        return None
    return connection.execute(select(SCHEMA_VERSION.c.version)).scalar_one()
