"""The tables, at the newest schema version.

Columns have only types that every driver accepts and returns unchanged (text, integers, floats, bytes): statements run
on the driver's own cursor, without SQLAlchemy's conversion of values (see ``state.database.database``). Structured
values are JSON text; booleans are 0 and 1. Times are seconds since the epoch.

Every table here except ``schema_version`` also has a column ``checksum`` (``state.integrity.row_checksums``).

A change here needs a migration in :mod:`twinkle.server.state.database.migrations`.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

from twinkle.server.state.integrity.row_checksums import CHECKSUM

METADATA = MetaData()


def _table(name: str, *parts: Column[Any] | Index, sqlite_with_rowid: bool = True) -> Table:
    """Declare a table and add the column ``checksum`` at its end."""
    checksum = Column(CHECKSUM, BigInteger, nullable=False, server_default="0")
    return Table(name, METADATA, *parts, checksum, sqlite_with_rowid=sqlite_with_rowid)


SCHEMA_VERSION = Table("schema_version", METADATA, Column("version", Integer, nullable=False))

SESSIONS = _table(
    "sessions",
    Column("session_id", String, primary_key=True),
    Column("tenant_id", String, nullable=False),
    Column("idempotency_key", String),
    Column("created_at", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("state", String, nullable=False),
    Column("sdk_version", String, nullable=False),
    Column("display_name", Text),
    Column("project_id", String),
    Column("tags", Text, nullable=False),
    Column("user_metadata", Text, nullable=False),
    Column("finish_reason", String),
    Column("finish_detail", Text),
    Index("sessions_by_idempotency_key", "tenant_id", "idempotency_key", unique=True),
    Index("sessions_by_tenant", "tenant_id", "created_at"),
    Index("sessions_by_last_seen", "state", "last_seen"),
    Index("sessions_by_state_of_tenant", "tenant_id", "state"),
)

RUNS = _table(
    "runs",
    Column("run_id", String, primary_key=True),
    Column("session_id", String, ForeignKey("sessions.session_id"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("tenant_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("model_name", String, nullable=False),
    Column("spec", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_request_at", Double, nullable=False),
    Column("state", String, nullable=False),
    Column("user_metadata", Text, nullable=False),
    Column("note", Text),
    Column("replica", String, nullable=False, server_default=""),
    Index("runs_by_number", "session_id", "number", unique=True),
    Index("runs_by_tenant", "tenant_id", "last_request_at"),
    Index("runs_by_state", "state"),
)

CHECKPOINTS = _table(
    "checkpoints",
    Column("run_id", String, ForeignKey("runs.run_id"), primary_key=True),
    Column("kind", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("tenant_id", String, nullable=False),
    Column("request_id", String, nullable=False),
    Column("directory", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("expires_at", Double),
    Column("public", Integer, nullable=False),
    Column("user_metadata", Text, nullable=False),
    Index("checkpoints_by_tenant", "tenant_id", "created_at"),
    Index("checkpoints_by_expiry", "expires_at"),
)

SAMPLING_SESSIONS = _table(
    "sampling_sessions",
    Column("sampling_session_id", String, primary_key=True),
    Column("session_id", String, ForeignKey("sessions.session_id"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("tenant_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("model_name", String, nullable=False),
    Column("model_path", Text),
    Column("version_id", String),
    Column("directory", Text),
    Column("created_at", Double, nullable=False),
    Column("replica", String, nullable=False, server_default=""),
    Column("size_bytes", BigInteger, nullable=False, server_default="0"),
    Index("sampling_sessions_by_number", "session_id", "number", unique=True),
    Index("sampling_sessions_by_size", "tenant_id", "size_bytes"),
)

# The clients that share a sampling session. A row exists for a client that was given its own number or that has used
# sequence numbers; first_seq (inclusive) to next_seq (exclusive) may be in use.
SAMPLING_CLIENTS = _table(
    "sampling_clients",
    Column("sampling_session_id", String, ForeignKey("sampling_sessions.sampling_session_id"), primary_key=True),
    Column("client", BigInteger, primary_key=True, autoincrement=False),
    Column("first_seq", BigInteger, nullable=False),
    Column("next_seq", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# Losses that sessions have defined. A body is a few kilobytes; it is read when the first op uses the loss.
CUSTOM_LOSSES = _table(
    "custom_losses",
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

# One row for each op; the bytes of body and outcome are in the journal. Accepting an op changes a single B-tree: on
# SQLite the rows are stored in the primary key (WITHOUT ROWID). There is no other index, so pruning scans the table.
OPS = _table(
    "ops",
    Column("adapter_id", String, ForeignKey("runs.run_id"), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("body_segment", BigInteger, nullable=False),
    Column("body_offset", BigInteger, nullable=False),
    Column("body_length", BigInteger, nullable=False),
    Column("accepted_at", Double, nullable=False),
    Column("outcome_segment", BigInteger),
    Column("outcome_offset", BigInteger),
    Column("outcome_length", BigInteger),
    Column("encoding", String),
    Column("failed", Integer, nullable=False),
    Column("finished_at", Double),
    Column("delivered_at", Double),
    Column("ending", String),
    sqlite_with_rowid=False,
)

SNAPSHOTS = _table(
    "snapshots",
    Column("adapter_id", String, ForeignKey("runs.run_id"), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("directory", Text, nullable=False),
    Column("failed_seq", BigInteger),
    Column("taken_at", Double, nullable=False),
)

# Which process may do work that only one of several processes may do, and until when.
LEASES = _table(
    "leases",
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("until", Double, nullable=False),
)

# Points of the curves of runs. ``seq`` is the op of an optimizer step, and NULL in a point that a client logged.
RUN_METRICS = _table(
    "run_metrics",
    Column("run_id", String, ForeignKey("runs.run_id"), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("recorded_at", Double, nullable=False),
    Column("seq", BigInteger),
    Column("step", BigInteger, nullable=False),
    Column("metrics", Text, nullable=False),
    sqlite_with_rowid=False,
)

# The names that a client has used so far for the values that it logs.
RUN_METRIC_NAMES = _table(
    "run_metric_names",
    Column("run_id", String, ForeignKey("runs.run_id"), primary_key=True),
    Column("name", String, primary_key=True),
    sqlite_with_rowid=False,
)

API_KEYS = _table(
    "api_keys",
    Column("key_id", String, primary_key=True),
    Column("tenant_id", String, nullable=False),
    Column("name", Text, nullable=False),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)

# The names of tenants. A tenant whose key was created without a name, or that has no key (open mode), has no row.
TENANTS = _table(
    "tenants",
    Column("tenant_id", String, primary_key=True),
    Column("name", Text, nullable=False),
    Column("named_at", Double, nullable=False),
    Index("tenants_by_name", "name", unique=True),
)

# Usage of one tenant on one day; see twinkle.server.usage. ``storage_bytes``: the maximum on disk that day.
USAGE = _table(
    "usage",
    Column("tenant_id", String, primary_key=True),
    Column("day", String, primary_key=True),
    Column("trained_tokens", BigInteger, nullable=False),
    Column("sampled_tokens", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("optim_steps", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("storage_bytes", BigInteger, nullable=False),
)

# Requests that an operator sends to the running server with the command line.
OPERATOR_REQUESTS = _table(
    "operator_requests",
    Column("request_id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("target", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("answer", Text),
    Column("failed", Integer, nullable=False),
)

AUDIT = _table(
    "audit",
    Column("entry_id", String, primary_key=True),
    Column("tenant_id", String, nullable=False),
    Column("at", Double, nullable=False),
    Column("event", String, nullable=False),
    Column("details", Text, nullable=False),
    Index("audit_by_tenant", "tenant_id", "at"),
    Index("audit_by_time", "at"),
)

# Damage that was found, and its consequences. ``subject``: kind and id of the damaged thing: "run s-1:train:0".
DAMAGE = _table(
    "damage",
    Column("subject", String, primary_key=True),
    Column("tenant_id", String),
    Column("run_id", String),
    Column("message", Text, nullable=False),
    Column("found_at", Double, nullable=False),
)
