"""What the server must still know after it was killed: a database for records, a journal for bytes."""

from twinkle.server.state.database.database import Page
from twinkle.server.state.errors import (
    CheckpointExistsError,
    DamagedRecordError,
    DamagedStateError,
    DatabaseConnectionError,
    DatabaseInUseError,
    DatabaseUnavailableError,
    DataDirInUseError,
    JournalError,
    SchemaVersionError,
    StorageFullError,
    StoreClosedError,
)
from twinkle.server.state.records.audit import Audit, AuditEntry
from twinkle.server.state.records.checkpoints import Checkpoints
from twinkle.server.state.records.coordination import EVICT, Claim, Leases, OperatorRequest, OperatorRequests
from twinkle.server.state.records.damage import Damage, DamageRecords
from twinkle.server.state.records.keys import KeyRecord, Keys
from twinkle.server.state.records.ops import Accepted, AcceptedRun, Ops, Pruned
from twinkle.server.state.records.retention import Retention
from twinkle.server.state.records.run_metrics import RunMetrics
from twinkle.server.state.records.runs import Runs, RunState, Snapshots
from twinkle.server.state.records.sampling import SAMPLING_SESSION_ROWS, SamplingSessions
from twinkle.server.state.records.sessions import SESSION_ROWS, Sessions
from twinkle.server.state.records.usage import DailyUsage, UsageRecords
from twinkle.server.state.store import Store

__all__ = [
    "EVICT",
    "SAMPLING_SESSION_ROWS",
    "SESSION_ROWS",
    "Accepted",
    "AcceptedRun",
    "Audit",
    "AuditEntry",
    "CheckpointExistsError",
    "Checkpoints",
    "Claim",
    "DailyUsage",
    "Damage",
    "DamageRecords",
    "DamagedRecordError",
    "DamagedStateError",
    "DataDirInUseError",
    "DatabaseConnectionError",
    "DatabaseInUseError",
    "DatabaseUnavailableError",
    "JournalError",
    "KeyRecord",
    "Keys",
    "Leases",
    "OperatorRequest",
    "OperatorRequests",
    "Ops",
    "Page",
    "Pruned",
    "Retention",
    "RunMetrics",
    "RunState",
    "Runs",
    "SamplingSessions",
    "SchemaVersionError",
    "Sessions",
    "Snapshots",
    "StorageFullError",
    "Store",
    "StoreClosedError",
    "UsageRecords",
]
