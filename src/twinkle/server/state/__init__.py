"""What the server must still know after it was killed: a database for records, a journal for bytes, and files.

``records/`` has the areas of the state, ``database/`` the tables, the two databases they can be in, and the journal,
``files/`` the data directory, ``integrity/`` what finds damage and puts it right. Nothing here knows a protocol.
"""

from twinkle.server.state.database.database import Page
from twinkle.server.state.errors import (
    CheckpointExistsError,
    Damage,
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
from twinkle.server.state.records.audit import AuditEntry
from twinkle.server.state.records.coordination import EVICT, Claim, OperatorRequest
from twinkle.server.state.records.keys import Keys
from twinkle.server.state.records.run_metrics import RunMetrics
from twinkle.server.state.records.sampling import SAMPLING_SESSION_ROWS, SamplingSessions
from twinkle.server.state.records.sessions import SESSION_ROWS
from twinkle.server.state.records.usage import DailyUsage
from twinkle.server.state.store import Store

__all__ = [
    "EVICT",
    "SAMPLING_SESSION_ROWS",
    "SESSION_ROWS",
    "AuditEntry",
    "CheckpointExistsError",
    "Claim",
    "DailyUsage",
    "Damage",
    "DamagedRecordError",
    "DamagedStateError",
    "DataDirInUseError",
    "DatabaseConnectionError",
    "DatabaseInUseError",
    "DatabaseUnavailableError",
    "JournalError",
    "Keys",
    "OperatorRequest",
    "Page",
    "RunMetrics",
    "SamplingSessions",
    "SchemaVersionError",
    "StorageFullError",
    "Store",
    "StoreClosedError",
]
