"""The key that a launch generates for a server that other machines can reach and for which nobody chose how keys work.

Such a server never runs open. Its first launch generates one key. The database has the key's hash, as of every key. If
a person reads the output, the key is shown there, once; otherwise it is written to the file ``generated-key`` in the
data directory, the only place where a key is stored. Which of the two it is:

    embedded, standard output is a terminal                   shown
    service, pipe, ``--no-wait``, container, runtime: ray     file; only its path is printed

A key is generated only if the server never had one. If all keys are revoked, the server stays closed until an operator
creates another key: a new key that nobody asked for would undo the revocation. A server that has generated a key does
not become open because its address changes: the operator has to choose a mode then.
"""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.state.files.data_dir import sync
from twinkle.server.state.integrity.copies import write_private
from twinkle.server.state.records.keys import GENERATED_KEY_ID, KeyRecord, new_key
from twinkle.server.state.store import Store

_FILE = "generated-key"
_ANOTHER = "twinkle-server keys create"


async def prepare_key(config: ServerConfig, store: Store, *, may_show: bool) -> list[str]:
    """Generate the server's first key if its mode follows from its address and it never had one.

    Return lines that tell the operator where the key is. They do not contain the key. There are none if ``auth`` says
    how keys work.
    ``may_show``: show the key if standard output is a terminal that a person reads.
    """
    if config.auth.mode is not None or config.auth.allow_open_on_network:
        return []
    known = await store.keys.list()
    if not config.generates_key:
        _check_stays_closed(config, known)
        return []
    if known:
        return await _about(store, known)
    key = new_key()
    made = await (_show(store, key) if may_show and _is_read_by_person() else _write(store, key))
    return await _about(store, await store.keys.list()) if made is None else made


async def prepare_key_of(config: ServerConfig) -> list[str]:
    """Open the state of a server, do the same as :func:`prepare_key`, and close it. The key is not shown.

    A launch on Ray calls this once, before the server's processes open the state: they start at the same time, so none
    of them generates a key.
    """
    if config.auth.mode is not None or config.auth.allow_open_on_network:
        return []
    if not config.generates_key and not config.data_dir.exists():
        return []
    store = await Store.open(config.data_dir, config.database_url, lock=False)
    try:
        return await prepare_key(config, store, may_show=False)
    finally:
        await store.close()


async def delete_file_of(store: Store, key_id: str) -> Path | None:
    """Delete the file of the generated key if it holds the key with this id; return its path if it did."""
    file = store.data_dir / _FILE
    record = await _key_in(file, store)
    if record is None or record.key_id != key_id:
        return None
    file.unlink(missing_ok=True)
    return file


# --- a new key --------------------------------------------------------------------------------------------------------


async def _show(store: Store, key: str) -> list[str] | None:
    """Store the key's hash and print the key. None if the server got a key meanwhile, and this one was not stored."""
    record = await store.keys.add_first(key, time.time())
    if record is None:
        return None
    print(
        "other machines can reach this server, so it needs a key: it was generated now and is not shown again\n"
        f"  export TINKER_API_KEY={key} TWINKLE_SERVER_TOKEN={key}",
        flush=True,
    )
    return [f"the generated key ({record.key_id}) was shown above and is not stored; another one: {_ANOTHER}"]


async def _write(store: Store, key: str) -> list[str] | None:
    """Write the key to its file and store its hash. None if the server got a key meanwhile, and this one is gone.

    The file comes first: a launch that is killed in between leaves a file whose key is not valid, which the next launch
    replaces. The other way round it would leave a key that nobody knows. For the same reason the file stays if it is
    not known whether the hash was stored: after an interrupt, or an error of the database.
    """
    file = store.data_dir / _FILE
    try:
        write_private(file, f"{key}\n".encode())
        sync(store.data_dir)
    except OSError as error:
        raise TwinkleServerError(
            f"cannot write the generated key to {file}: {error.strerror or error}; nothing was stored. Make the file "
            f"writable, or create a key yourself ({_ANOTHER})"
        ) from error
    record = await store.keys.add_first(key, time.time())
    if record is None:
        file.unlink(missing_ok=True)
        return None
    return _where(file, record)


def _check_stays_closed(config: ServerConfig, known: Sequence[KeyRecord]) -> None:
    """Raise if a server that generated a key would now accept any key, without anybody having chosen that."""
    if any(record.key_id == GENERATED_KEY_ID for record in known):
        raise TwinkleServerError(
            f"auth.mode: not given, and by http_options.host ({config.http_options.host}) and public_url "
            f"({config.public_url or 'not given'}) only this machine can reach the server, so it would accept any key; "
            "but it has generated a key, when other machines could reach it. Set auth.mode: keys to keep "
            "its keys in force, or auth.mode: open to accept any key"
        )


def _is_read_by_person() -> bool:
    """Return whether standard output is a terminal, and not that of a container's first process, which is logged."""
    if not sys.stdout.isatty():
        return False
    own = os.fstat(sys.stdout.fileno())
    try:
        return not os.path.samestat(os.stat("/proc/1/fd/1"), own)
    except OSError:  # process 1 belongs to another user: compare with its controlling terminal, which all may read
        return _terminal_of_first_process() != (os.major(own.st_rdev), os.minor(own.st_rdev))


def _terminal_of_first_process() -> tuple[int, int] | None:
    """Return the device numbers of the terminal of process 1, which is (0, 0) if it has none; None if unknown."""
    try:
        stat = Path("/proc/1/stat").read_text()
    except OSError:  # no Linux
        return None
    number = int(stat.rpartition(")")[2].split()[4])  # tty_nr; the process's name in parentheses may contain spaces
    return number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00


# --- a key that is there ----------------------------------------------------------------------------------------------


async def _about(store: Store, known: Sequence[KeyRecord]) -> list[str]:
    """Return the lines for a server that has keys already, generated or created, valid or revoked."""
    file = store.data_dir / _FILE
    valid = {record.key_id: record for record in known if record.revoked_at is None}
    lines = [] if valid else [f"warning: every key is revoked, so every request is refused; a new key: {_ANOTHER}"]
    in_file = await _key_in(file, store)
    if in_file is not None:
        return [*lines, *_where(file, in_file)]
    if file.exists():
        return [*lines, f"the key in {file} is not valid: delete the file"]
    generated = valid.get(GENERATED_KEY_ID)
    if generated is not None:
        day = datetime.fromtimestamp(generated.created_at, UTC).strftime("%Y-%m-%d")
        lines.append(
            f"the key generated on {day} ({generated.key_id}) is still valid and is in no file here; another key of "
            f"the same tenant: {_ANOTHER} --tenant {generated.tenant_id}"
        )
    return lines


def _where(file: Path, record: KeyRecord) -> list[str]:
    """Return the lines about a key in its file, with a command for clients on this machine that does not show it."""
    path = shlex.quote(str(file))
    return [
        f"the generated key ({record.key_id}) is in {file}",
        f'  export TINKER_API_KEY="$(cat {path})" TWINKLE_SERVER_TOKEN="$(cat {path})"',
    ]


async def _key_in(file: Path, store: Store) -> KeyRecord | None:
    """Return the record of the key in the file; None if there is no file, or its key is unknown or revoked."""
    try:
        key = file.read_text().strip()
    except (OSError, ValueError):
        return None
    return await store.keys.find(key)
