"""The migrations of the database schema. A new database gets the newest tables; an older one is migrated step by step.

``MIGRATIONS[n]`` leads from version ``n + 1`` to ``n + 2``. A migration uses plain SQL or tables that it declares
itself, never those of ``state.database.tables``, which keep changing. Never edit a migration that was released. A new
migration that creates a table gives it the column ``checksum``. A new migration that changes a table calls
:func:`~twinkle.server.state.integrity.row_checksums.fill_checksums` for that table at its end. (The migrations before
version 9, which introduced the checksums, do neither.)
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    insert,
    inspect,
    select,
    update,
)

from twinkle.server.state.database.tables import METADATA, SCHEMA_VERSION
from twinkle.server.state.errors import SchemaVersionError
from twinkle.server.state.integrity.row_checksums import fill_checksums

logger = logging.getLogger(__name__)

Migration = Callable[[Connection], None]


def _run(connection: Connection, *statements: str) -> None:
    """Run statements, with {double} and {without_rowid} replaced by this database's words, which may be empty."""
    is_sqlite = connection.dialect.name == "sqlite"
    double, without_rowid = ("DOUBLE", "WITHOUT ROWID") if is_sqlite else ("DOUBLE PRECISION", "")
    for statement in statements:
        connection.exec_driver_sql(statement.format(double=double, without_rowid=without_rowid))


def _add_sampling_clients(connection: Connection) -> None:
    _run(
        connection,
        """
        CREATE TABLE sampling_clients (
            sampling_session_id VARCHAR NOT NULL REFERENCES sampling_sessions (sampling_session_id),
            client BIGINT NOT NULL,
            first_seq BIGINT NOT NULL,
            next_seq BIGINT NOT NULL,
            PRIMARY KEY (sampling_session_id, client)
        ) {without_rowid}
        """,
    )


def _add_replicas(connection: Connection) -> None:
    _run(
        connection,
        "ALTER TABLE runs ADD COLUMN replica VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE sampling_sessions ADD COLUMN replica VARCHAR NOT NULL DEFAULT ''",
        "CREATE TABLE leases (name VARCHAR NOT NULL PRIMARY KEY, holder VARCHAR NOT NULL, until {double} NOT NULL)",
    )


def _add_run_metrics(connection: Connection) -> None:
    _run(
        connection,
        """
        CREATE TABLE run_metrics (
            run_id VARCHAR NOT NULL REFERENCES runs (run_id),
            number BIGINT NOT NULL,
            recorded_at {double} NOT NULL,
            seq BIGINT,
            step BIGINT NOT NULL,
            metrics TEXT NOT NULL,
            PRIMARY KEY (run_id, number)
        ) {without_rowid}
        """,
        """
        CREATE TABLE run_metric_names (
            run_id VARCHAR NOT NULL REFERENCES runs (run_id),
            name VARCHAR NOT NULL,
            PRIMARY KEY (run_id, name)
        ) {without_rowid}
        """,
    )


def _add_custom_losses(connection: Connection) -> None:
    schema = MetaData()
    Table("sessions", schema, Column("session_id", String, primary_key=True))
    table = Table(
        "custom_losses",
        schema,
        Column("loss_id", String, primary_key=True),
        Column("session_id", String, ForeignKey("sessions.session_id"), nullable=False),
        Column("number", BigInteger, nullable=False),
        Column("tenant_id", String, nullable=False),
        Column("digest", LargeBinary, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("error", Text),
        Column("created_at", Double, nullable=False),
        Index("custom_losses_by_tenant", "tenant_id"),
    )
    table.create(connection)


def _add_usage(connection: Connection) -> None:
    """Add usage, requests of operators, and sizes of sampler versions. Versions that exist already count as 0 bytes."""
    counters = "trained_tokens", "sampled_tokens", "prompt_tokens", "optim_steps", "requests", "storage_bytes"
    columns = ", ".join(f"{name} BIGINT NOT NULL" for name in counters)
    _run(
        connection,
        f"CREATE TABLE usage (tenant_id VARCHAR NOT NULL, day VARCHAR NOT NULL, {columns},"
        " PRIMARY KEY (tenant_id, day))",
        """
        CREATE TABLE operator_requests (
            request_id VARCHAR NOT NULL,
            kind VARCHAR NOT NULL,
            target VARCHAR NOT NULL,
            created_at {double} NOT NULL,
            answer TEXT,
            failed INTEGER NOT NULL,
            PRIMARY KEY (request_id)
        )
        """,
        "ALTER TABLE sampling_sessions ADD COLUMN size_bytes BIGINT NOT NULL DEFAULT 0",
        "CREATE INDEX sampling_sessions_by_size ON sampling_sessions (tenant_id, size_bytes)",
        "CREATE INDEX sessions_by_state_of_tenant ON sessions (tenant_id, state)",
    )


def _add_audit_and_finish_reasons(connection: Connection) -> None:
    _run(
        connection,
        """
        CREATE TABLE audit (
            entry_id VARCHAR NOT NULL PRIMARY KEY,
            tenant_id VARCHAR NOT NULL,
            at {double} NOT NULL,
            event VARCHAR NOT NULL,
            details TEXT NOT NULL
        )
        """,
        "CREATE INDEX audit_by_tenant ON audit (tenant_id, at)",
        "CREATE INDEX audit_by_time ON audit (at)",
        "ALTER TABLE sessions ADD COLUMN finish_reason VARCHAR",
        "ALTER TABLE sessions ADD COLUMN finish_detail TEXT",
    )


def _add_endings(connection: Connection) -> None:
    """Add how ops ended, and clear the failed pass in snapshots of native adapters.

    Since this version a failed pass does not spoil the window of a native adapter; only a missing sequence number does.
    Native run ids have no colon; Tinker's contain ``:train:``.
    """
    connection.exec_driver_sql("ALTER TABLE ops ADD COLUMN ending VARCHAR")
    snapshots = Table("snapshots", MetaData(), Column("adapter_id", String), Column("failed_seq", BigInteger))
    native = snapshots.c.adapter_id.not_like("%:train:%")
    connection.execute(update(snapshots).where(native).values(failed_seq=None))


def _add_checksums_and_damage(connection: Connection) -> None:
    """Add a checksum to the rows of all tables but ``schema_version`` and ``writers``, and the table ``damage``."""
    tables = [name for name in inspect(connection).get_table_names() if name not in ("schema_version", "writers")]
    for name in tables:
        connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN checksum BIGINT NOT NULL DEFAULT 0")
        fill_checksums(connection, name)
    _run(
        connection,
        """
        CREATE TABLE damage (
            subject VARCHAR NOT NULL PRIMARY KEY,
            tenant_id VARCHAR,
            run_id VARCHAR,
            message TEXT NOT NULL,
            found_at {double} NOT NULL,
            checksum BIGINT NOT NULL DEFAULT 0
        )
        """,
    )


def _add_names_of_tenants(connection: Connection) -> None:
    """Add the table ``tenants`` and give each tenant that has a named key the name of its first such key.

    A tenant whose id an operator chose, which earlier versions allowed, gets its id as its name. Earlier versions also
    made a new tenant for each key of the same name. Of several such tenants the oldest gets the name, and the others
    get it with a number, as in alice-2. Their keys and data stay as they are; a line of the log names both ids.
    """
    _run(
        connection,
        """
        CREATE TABLE tenants (
            tenant_id VARCHAR NOT NULL PRIMARY KEY,
            name TEXT NOT NULL,
            named_at {double} NOT NULL,
            checksum BIGINT NOT NULL DEFAULT 0
        )
        """,
        "CREATE UNIQUE INDEX tenants_by_name ON tenants (name)",
    )
    columns = [
        Column("key_id", String),
        Column("tenant_id", String),
        Column("name", Text),
        Column("created_at", Double),
    ]
    keys = Table("api_keys", MetaData(), *columns)
    found = connection.execute(select(keys).order_by(keys.c.created_at, keys.c.key_id)).mappings().all()
    chosen = {row["tenant_id"]: row["tenant_id"] for row in found if not _GENERATED_TENANT.fullmatch(row["tenant_id"])}
    for row in found:
        name = _usable_name(row["name"])
        if name:
            chosen.setdefault(row["tenant_id"], name)
    owners: dict[str, str] = {}
    wanted = set(chosen.values()) | {row["name"] for row in found}
    for tenant_id, name in chosen.items():
        owners[_free_name(name, owners, wanted, tenant_id)] = tenant_id
    tenants = Table(
        "tenants", MetaData(), Column("tenant_id", String), Column("name", Text), Column("named_at", Double)
    )
    for name, tenant_id in owners.items():
        connection.execute(insert(tenants).values(tenant_id=tenant_id, name=name, named_at=time.time()))
    fill_checksums(connection, "tenants")


_GENERATED_TENANT = re.compile("tenant-[0-9a-f]{24}")
_LONGEST_NAME = 100


def _usable_name(key_name: str) -> str:
    """Return the name of a key as the name of its tenant; empty if it is empty or looks like a generated id."""
    name = "".join(character for character in key_name if character.isprintable()).strip()[:_LONGEST_NAME].strip()
    return "" if _GENERATED_TENANT.fullmatch(name) else name


def _free_name(name: str, owners: Mapping[str, str], wanted: Collection[str], tenant_id: str) -> str:
    """Return ``name`` for a tenant or, if another tenant has it already, the name with a number; log a warning then.

    The name with a number is none of those ``wanted`` by any tenant: the configuration may have limits for that name,
    which are meant for its owner.
    """
    if name not in owners:
        return name
    number = 2
    while f"{name}-{number}" in owners or f"{name}-{number}" in wanted:
        number += 1
    logger.warning(
        "two tenants were named %r: %s keeps the name, and %s is named %r from now on; their keys and data are "
        "unchanged (twinkle-server rename-tenant changes a name)",
        *(name, owners[name], tenant_id, f"{name}-{number}"),
    )
    return f"{name}-{number}"


MIGRATIONS: Sequence[Migration] = (
    _add_sampling_clients,
    _add_replicas,
    _add_run_metrics,
    _add_custom_losses,
    _add_usage,
    _add_audit_and_finish_reasons,
    _add_endings,
    _add_checksums_and_damage,
    _add_names_of_tenants,
)


def migrate(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the database to the newest version. The caller has begun the transaction, so all steps apply or none."""
    version, known = _versions(connection, migrations)
    if version is None:
        METADATA.create_all(connection)
        connection.execute(insert(SCHEMA_VERSION).values(version=known))
        return
    for step in migrations[version - 1 :]:
        step(connection)
    connection.execute(update(SCHEMA_VERSION).values(version=known))


def needs_migration(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> bool:
    """Return whether the database is new or older than this version; SchemaVersionError if it is newer."""
    version, known = _versions(connection, migrations)
    return version != known


def _versions(connection: Connection, migrations: Sequence[Migration]) -> tuple[int | None, int]:
    """Return the schema version of the database (None: it is new), and the newest version that is known.

    Raises SchemaVersionError if the database is newer than that.
    """
    known = 1 + len(migrations)
    if not inspect(connection).has_table(SCHEMA_VERSION.name):
        return None, known
    version = connection.execute(select(SCHEMA_VERSION.c.version)).scalar_one()
    if version > known:
        raise SchemaVersionError(version, known)
    return version, known
