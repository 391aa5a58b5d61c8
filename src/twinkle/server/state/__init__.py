"""What the server must still know after it was killed: a database for records, a journal for bytes."""

from twinkle.server.state.audit import Audit, AuditEntry
from twinkle.server.state.checkpoints import Checkpoints
from twinkle.server.state.database import Page
from twinkle.server.state.errors import (
    CheckpointExistsError,
    DatabaseConnectionError,
    DatabaseInUseError,
    DatabaseUnavailableError,
    DataDirInUseError,
    JournalError,
    SchemaVersionError,
    StorageFullError,
    StoreClosedError,
)
from twinkle.server.state.keys import KeyRecord, Keys
from twinkle.server.state.ops import Accepted, AcceptedRun, Ops, Pruned
from twinkle.server.state.runs import Runs, RunState
from twinkle.server.state.sampling import SamplingSessions
from twinkle.server.state.sessions import Sessions
from twinkle.server.state.snapshots import Snapshots
from twinkle.server.state.store import Store

__all__ = [
    "Accepted",
    "AcceptedRun",
    "Audit",
    "AuditEntry",
    "CheckpointExistsError",
    "Checkpoints",
    "DataDirInUseError",
    "DatabaseConnectionError",
    "DatabaseInUseError",
    "DatabaseUnavailableError",
    "JournalError",
    "KeyRecord",
    "Keys",
    "Ops",
    "Page",
    "Pruned",
    "RunState",
    "Runs",
    "SamplingSessions",
    "SchemaVersionError",
    "Sessions",
    "Snapshots",
    "StorageFullError",
    "Store",
    "StoreClosedError",
]
