"""The errors of the server's own state, each also a standard-library type, and the record of damage on disk."""

from dataclasses import dataclass
from pathlib import Path

from twinkle.errors import QuotaError, TwinkleError, UserError
from twinkle.server.types import RunRecord


class StorageFullError(TwinkleError, OSError):
    """The disk of the data directory or of the database, or its quota, is full.

    Nothing of what the call wrote was stored.
    """


class DataDirInUseError(TwinkleError, OSError):
    """Another process holds the lock of this data directory: a server, or a command such as ``check-data``."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(f"data directory {data_dir} is in use by another server; stop it or choose another directory")


class DatabaseInUseError(TwinkleError, OSError):
    """Another server uses this database."""

    def __init__(self, name: str) -> None:
        super().__init__(f"database {name} is in use by another server; stop it or choose another database")


class DatabaseConnectionError(TwinkleError, OSError):
    """The database does not answer or refuses the connection.

    The message names internal machines, so clients must not see it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"database {name} cannot be used: {reason}")


class DatabaseUnavailableError(TwinkleError, OSError):
    """The database has been unreachable for too long. Nothing of what the call wrote was stored.

    If the store is closed during the outage, it may be unknown whether the last writes were stored.
    """

    def __init__(self) -> None:
        super().__init__("the server's database does not answer: nothing was kept, send the request again")


class SchemaVersionError(TwinkleError, RuntimeError):
    """The database was written by a newer Twinkle than this one."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the database has schema version {found}, this Twinkle knows versions up to {known}; "
            "install the newer Twinkle or choose another database"
        )


class JournalError(TwinkleError, OSError):
    """Bytes that the database points to are missing from the journal or damaged."""


class DamagedStateError(TwinkleError, OSError):
    """A file that all tenants depend on is damaged or missing, and the server cannot repair it by itself.

    ``done``: what was changed before this was found out.
    """

    def __init__(self, file: Path, what: str, data_dir: Path, done: str = "Nothing was changed") -> None:
        super().__init__(
            f"{file} {what}. {done}. `twinkle-server check-data --data-dir {data_dir}` lists "
            "the damage; with --repair it puts back the server's own copy and says what is lost by that; "
            "`twinkle-server restore` makes a new data directory from a backup"
        )


class DamagedRecordError(UserError):
    """The record that a client asks for was damaged on the server's disk."""


class StoreClosedError(TwinkleError, RuntimeError):
    """The store is closed, or its journal was opened only for reading, as by commands, and the call would write."""


class ReplicaHeldError(UserError):
    """A run trains all parameters of the replica, and so no other run can begin there. ``holder``: that run.

    Only the server sees ``holder``. Tenants see the message, which must not say who holds the replica.
    """

    def __init__(self, holder: RunRecord, message: str = "another run holds this replica of the model") -> None:
        super().__init__(message)
        self.holder = holder


# Errors that a write returns instead of raising them; its caller gets them raised.
Refusal = QuotaError | ReplicaHeldError


class CheckpointExistsError(UserError):
    """A checkpoint has this name already, and the request does not allow replacing it."""

    def __init__(self, run_id: str, kind: str, name: str) -> None:
        super().__init__(
            f"name: run {run_id} has a checkpoint {kind}/{name} already; choose another name, delete it, "
            "or pass overwrite"
        )


@dataclass(frozen=True)
class Damage:
    """One entry about damage that was found on disk.

    ``subject`` names the kind and the id of the damaged thing, such as "run s-1:train:0". ``tenant_id`` and ``run_id``
    are its owner, where the owner is known.
    """

    subject: str
    message: str
    found_at: float
    tenant_id: str | None = None
    run_id: str | None = None


def lost_run(run_id: object, what: str) -> str:
    """Return the message for the client of a run that cannot continue. ``what`` is the reason."""
    return f"model {run_id}: {what}; load one of its checkpoints into a new model"
