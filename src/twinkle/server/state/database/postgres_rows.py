"""Rows on PostgreSQL whose checksum is wrong. PostgreSQL looks after its own structure, so no row is rewritten here.

A run whose own row, snapshot or op is damaged is failed; everything else is named in the log and in the table
``damage``.
"""

import logging
import time
from typing import Any

from sqlalchemy import Connection, insert, select, update

from twinkle.server.state.database.tables import DAMAGE, METADATA, RUNS
from twinkle.server.state.integrity.row_checksums import CHECKSUM, checked_columns, expected_checksum, with_checksums

__all__ = ["fail_damaged"]

_logger = logging.getLogger(__name__)


def fail_damaged(connection: Connection) -> int:
    """Compare every row with its checksum, and fail the runs of those that are damaged; returns how many there are."""
    found = 0
    for table in METADATA.sorted_tables:
        columns = checked_columns(table)
        if not columns:
            continue
        wrong = select(*columns).where(table.c[CHECKSUM] != expected_checksum(columns))
        for row in connection.execute(wrong).mappings().all():
            found += 1
            _fail(connection, table.name, dict(row), ", ".join(str(row[each.name]) for each in table.primary_key))
    return found


def _fail(connection: Connection, table: str, row: dict[str, Any], key: str) -> None:
    run_id = row.get("adapter_id") or row.get("run_id")
    what = f"a row of the table {table} ({key}) is damaged in the server's database"
    is_run = table in ("runs", "snapshots", "ops")
    message = f"model {run_id}: {what}; load one of its checkpoints into a new model" if is_run else what
    if is_run:
        change = (
            update(RUNS).where(RUNS.c.run_id == run_id, RUNS.c.state == "live").values(state="failed", note=message)
        )
        connection.execute(with_checksums(change, connection.dialect.name)[0])
    subject = f"run {run_id}" if is_run else f"row of {table} {key}"
    _logger.error("damaged: %s (tenant %s): %s", subject, row.get("tenant_id", "unknown"), message)
    if connection.execute(select(DAMAGE.c.subject).where(DAMAGE.c.subject == subject)).first() is None:
        entry = {
            "subject": subject,
            "tenant_id": row.get("tenant_id"),
            "run_id": run_id,
            "message": message,
            "found_at": time.time(),
        }
        connection.execute(with_checksums(insert(DAMAGE), connection.dialect.name)[0], entry)
