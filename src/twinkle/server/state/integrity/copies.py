"""Copies of files that all tenants depend on, in ``copies/`` of the data directory, and notes about the last start.

secret     a copy of the secret with a checksum: if the secret or the copy is damaged, it is restored from the other
state.db   a copy of the SQLite database, made when a server starts, when it ends, and about every ten minutes while it
           writes: for ``check-data --repair``, and to put back damaged rows
boot       the boot id of the machine when a server was last started on SQLite; see wal_check
database   the path of the SQLite file that the last server used
"""

import logging
import os
import re
import secrets
import sqlite3
import zlib
from contextlib import closing, suppress
from pathlib import Path

from twinkle.server.state.errors import DamagedStateError
from twinkle.server.state.files.data_dir import sync

COPIES = "copies"
_SECRET = "secret"
_DATABASE = "state.db"
_BOOT = "boot"
_PLACE = "database"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGITS = re.compile(rb"[0-9a-f]{64}")

_logger = logging.getLogger(__name__)


# --- the secret -------------------------------------------------------------------------------------------------------


def read_secret(data_dir: Path, *, may_make: bool) -> bytes:
    """Return the secret of a data directory, 64 hexadecimal digits, and repair it or its copy if necessary.

    A secret that differs from an undamaged copy is replaced by the copy. DamagedStateError if it is damaged without
    such a copy. ``may_make``: create a secret if there is none. Without it, DamagedStateError: keys or tenants depend
    on the old secret, and a new one would lock all of them out.
    """
    (data_dir / COPIES).mkdir(mode=0o700, exist_ok=True)
    file, copy_file = data_dir / _SECRET, data_dir / COPIES / _SECRET
    found, copy = _secret_in(file), _secret_in(copy_file, with_sum=True)
    if copy is not None and found != copy:
        _logger.error("%s was missing or damaged: it is put back from %s", file, copy_file)
        write_private(file, copy)
        return copy
    if found is None:
        if file.exists():
            raise DamagedStateError(file, "is damaged: it must hold 64 hexadecimal digits", data_dir)
        if not may_make:
            raise DamagedStateError(file, "is missing, and API keys and tenants depend on it", data_dir)
        found = new_secret(file)
    if copy is None:
        if copy_file.exists():
            _logger.error("%s was damaged: it is made again from %s", copy_file, file)
        with suppress(OSError):  # a full disk: the next start writes it
            write_private(copy_file, _with_sum(found))
    return found


def secret_problem(data_dir: Path) -> str | None:
    """Return what is wrong with the secret or its copy, or None. Nothing is changed."""
    file, copy_file = data_dir / _SECRET, data_dir / COPIES / _SECRET
    found, copy = _secret_in(file), _secret_in(copy_file, with_sum=True)
    if found is not None and found == copy:
        return None
    if copy is not None:
        return f"{file} is missing or damaged; the next start puts it back from {copy_file}"
    if found is None:
        return f"{file} is missing or damaged, and there is no copy"
    return f"{copy_file} is missing or damaged; the next start makes it again from {file}"


def _secret_in(file: Path, *, with_sum: bool = False) -> bytes | None:
    """Return the secret in a file; None if it is missing or damaged. ``with_sum``: a checksum follows the secret."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    secret = content[:64]
    is_whole = content == (_with_sum(secret) if with_sum else secret)
    return secret if is_whole and _DIGITS.fullmatch(secret) else None


def _with_sum(secret: bytes) -> bytes:
    return secret + b" %08x\n" % zlib.crc32(secret)


def new_secret(file: Path) -> bytes:
    """Create a secret and return it. If another process creates one at the same time, both return the same."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    write_private(draft, secrets.token_hex(32).encode())
    try:
        os.link(draft, file)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return file.read_bytes()


def write_private(file: Path, content: bytes) -> None:
    """Write a small file, completely or not at all, with mode 600. Its content is synced when this returns."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)


# --- the database -----------------------------------------------------------------------------------------------------


def copied_database(data_dir: Path) -> Path:
    return data_dir / COPIES / _DATABASE


def copy_database(database: Path, data_dir: Path) -> None:
    """Copy a database, which may be in use, to ``copies/``, completely or not at all."""
    target = copied_database(data_dir)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with closing(sqlite3.connect(database, timeout=10)) as live:
            copy_sqlite(live, draft)
        sync(draft)
        os.replace(draft, target)
    finally:
        for leftover in target.parent.glob(f"{draft.name}*"):
            leftover.unlink(missing_ok=True)


def copy_sqlite(live: sqlite3.Connection, target: Path) -> None:
    """Copy a database, which may be in use, as it is at one moment. The copy is a single file without a WAL."""
    target.unlink(missing_ok=True)
    target.touch(mode=0o600)
    with closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")


# --- the machine ------------------------------------------------------------------------------------------------------


def is_same_boot(data_dir: Path) -> bool:
    """Return whether the machine has not been rebooted since a server last started here; True if that is unknown."""
    try:
        return (data_dir / COPIES / _BOOT).read_text() == _BOOT_ID.read_text()
    except (OSError, ValueError):
        return True


def note_opening(data_dir: Path, database: Path) -> None:
    """Write to ``copies/`` in which boot of the machine, and with which SQLite file, a server started here."""
    (data_dir / COPIES).mkdir(mode=0o700, exist_ok=True)
    with suppress(OSError):  # a full disk
        if not is_same_boot(data_dir) or not (data_dir / COPIES / _BOOT).exists():
            write_private(data_dir / COPIES / _BOOT, _BOOT_ID.read_bytes())
        if not is_database_of(data_dir, database):
            write_private(data_dir / COPIES / _PLACE, bytes(database.absolute()))


def is_database_of(data_dir: Path, database: Path) -> bool:
    """Return whether the last server that started here used this SQLite file; False if that is unknown."""
    with suppress(OSError):
        return (data_dir / COPIES / _PLACE).read_bytes() == bytes(database.absolute())
    return False
