"""What can go wrong with the server's own state: errors, each also a standard-library type, and damage on disk."""

from dataclasses import dataclass
from pathlib import Path

from twinkle.errors import TwinkleError, UserError


class StorageFullError(TwinkleError, OSError):
    """The disk under the data directory is full (or its quota is). Nothing of the call was kept."""


class DataDirInUseError(TwinkleError, OSError):
    """Another server works in this data directory."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(f"data directory {data_dir} is in use by another server; stop it or choose another directory")


class DatabaseInUseError(TwinkleError, OSError):
    """Another server works with this database."""

    def __init__(self, name: str) -> None:
        super().__init__(f"database {name} is in use by another server; stop it or choose another database")


class DatabaseConnectionError(TwinkleError, OSError):
    """The database does not answer, or does not let us in. Names machines of ours: not for clients."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"database {name} cannot be used: {reason}")


class DatabaseUnavailableError(TwinkleError, OSError):
    """The database has been away for too long. Nothing of the call was kept."""

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
    """A file that all tenants depend on is damaged or missing, and the server cannot put it right by itself."""

    def __init__(self, file: Path, what: str, data_dir: Path) -> None:
        super().__init__(
            f"{file} {what}. Nothing was changed. `twinkle-server check-data --data-dir {data_dir}` says what "
            "is there; with --repair it puts back the copy that the server keeps and says what is lost by that; "
            "`twinkle-server restore` makes a new data directory from a backup"
        )


class DamagedRecordError(UserError):
    """The record of what the client asks for was damaged on the server's disk."""


class StoreClosedError(TwinkleError, RuntimeError):
    """The store was closed, or was opened for reading what this call would write."""


class CheckpointExistsError(UserError):
    """A checkpoint has this name already, and the request does not say that it may be replaced."""

    def __init__(self, run_id: str, kind: str, name: str) -> None:
        super().__init__(
            f"name: run {run_id} has a checkpoint {kind}/{name} already; choose another name, delete it, "
            "or pass overwrite"
        )


@dataclass(frozen=True)
class Damage:
    """``subject``: which kind of thing and which one. ``tenant_id``, ``run_id``: whose it is, where that is known."""

    subject: str
    message: str
    found_at: float
    tenant_id: str | None = None
    run_id: str | None = None


def lost_run(run_id: object, what: str) -> str:
    """Return what the client of a run is told that cannot go on."""
    return f"model {run_id}: {what}; load one of its checkpoints into a new model"
