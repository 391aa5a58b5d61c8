"""API keys and their tenants. A key is shown once, when it is created. Only its keyed hash is stored. (The key that a
launch generates may also be in a file of the data directory: ``runtime.generated_key``.)

The hashes' secret is in a file of the data directory, not in the database (``state.integrity.copies``). So neither
the database nor the secret alone is enough to find out or to try out a key.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import bindparam, select, update

from twinkle.server.state.database.database import Cursor, Database, Row
from twinkle.server.state.database.mapper import RecordMapper
from twinkle.server.state.database.tables import API_KEYS
from twinkle.server.state.records.area import Area
from twinkle.server.state.records.audit import add_entry
from twinkle.server.state.records.tenants import (
    check_is_free,
    check_name,
    check_no_other_tenant,
    name_new_tenant,
    tenant_named,
)

KEY_PREFIX = "tml-"
GENERATED_KEY_ID = f"key-{1:016x}"  # of the key that a launch generates: a server has one at most

_CACHE_SIZE = 4096

_WORKS = API_KEYS.c.revoked_at.is_(None)
_OF_ID = API_KEYS.c.key_id == bindparam("id")
_LIST = select(API_KEYS).order_by(API_KEYS.c.created_at, API_KEYS.c.key_id)
_BY_HASH = select(API_KEYS).where(API_KEYS.c.key_hash == bindparam("key_hash"), _WORKS)
_BY_ID = select(API_KEYS).where(_OF_ID, _WORKS)
_REVOKE = update(API_KEYS).where(_OF_ID, _WORKS).values(revoked_at=bindparam("now"))


@dataclass(frozen=True)
class KeyRecord:
    """The record of an API key. ``revoked_at`` is None while the key is valid."""

    key_id: str
    tenant_id: str
    name: str
    created_at: float
    revoked_at: float | None = None


_KEY = RecordMapper(KeyRecord, API_KEYS)


def new_key() -> str:
    """Return a random key, which is not stored yet."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


class Keys(Area):
    """The API keys.

    A key on record belongs to the tenant for which it was created. In open mode the gateway does not look at records:
    it accepts any key with the right prefix, and each is a tenant of its own (:meth:`open_tenant`).
    ``cache_seconds``: how long a key that another process revoked may still work.
    """

    def __init__(self, database: Database, secret: bytes, cache_seconds: float) -> None:
        super().__init__(database)
        self._cache_seconds = cache_seconds
        self._secret = secret
        # Cache by hash or id: the record, and the time (monotonic) until which it is used.
        self._found: dict[bytes | str, tuple[KeyRecord, float]] = {}

    async def create(self, tenant_id: str | None, name: str, now: float) -> tuple[KeyRecord, str]:
        """Create a key and return its record and the key. ``name`` may be empty.

        With ``tenant_id`` None, the key is for the tenant of this name: the one that has it, or else a new one. With an
        id, the name is only that of the key. InvalidInputError if the name is not allowed or is that of another tenant.
        """
        key, key_id, new_tenant = new_key(), f"key-{secrets.token_hex(8)}", _new_tenant()

        # Transactions run one after the other, also those of other processes: of two that create a key for the same new
        # name at the same time, the second finds the tenant that the first has made.
        def work(cursor: Cursor) -> KeyRecord:
            owner = tenant_id or (tenant_named(cursor, name) if name else None)
            record = KeyRecord(key_id, owner or new_tenant, name, now)
            if name and owner is None:
                check_name(name)
                check_is_free(cursor, name, new_tenant)
                name_new_tenant(cursor, new_tenant, name, now)
            elif name:
                check_no_other_tenant(cursor, name, record.tenant_id)
            self._insert(cursor, record, key)
            return record

        return await self._database.write(work), key

    async def add_first(self, key: str, now: float) -> KeyRecord | None:
        """Store a key that a launch generated, for a new tenant; None, and nothing is stored, if there is a key.

        Revoked keys count, too. Transactions run one after the other, so of several processes only one adds its key.
        """
        record = KeyRecord(GENERATED_KEY_ID, _new_tenant(), "generated", now)

        def work(cursor: Cursor) -> bool:
            if cursor.count(API_KEYS):
                return False
            if tenant_named(cursor, record.name) is None:  # an operator may have given a tenant of an open server it
                name_new_tenant(cursor, record.tenant_id, record.name, now)
            self._insert(cursor, record, key)
            return True

        return record if await self._database.write(work) else None

    def _insert(self, cursor: Cursor, record: KeyRecord, key: str) -> None:
        _KEY.insert(cursor, record, key_hash=self._hash(b"key", key))
        details = {"key_id": record.key_id, "name": record.name}
        add_entry(cursor, record.tenant_id, "key_create", record.created_at, details)

    async def list(self) -> tuple[KeyRecord, ...]:
        """Return all keys, oldest first, revoked ones too."""
        return await self._all(_KEY, _LIST)

    async def revoke(self, key_id: str, now: float) -> bool:
        """Revoke a key; return whether there was such a valid key. Other processes notice within ``cache_seconds``."""

        def work(cursor: Cursor) -> bool:
            row = cursor.row(_BY_ID, {"id": key_id})
            if row is None:
                return False
            cursor.execute(_REVOKE, {"id": key_id, "now": now})
            add_entry(cursor, row["tenant_id"], "key_revoke", now, {"key_id": key_id, "name": row["name"]})
            return True

        revoked = await self._database.write(work)
        self._found.clear()
        return revoked

    async def find(self, key: str) -> KeyRecord | None:
        """Return the record of a key; None if the key is unknown or revoked."""
        key_hash = self._hash(b"key", key)
        return await self._cached(key_hash, lambda cursor: _by_hash(cursor, key_hash))

    async def find_by_id(self, key_id: str) -> KeyRecord | None:
        """Return the record of the key with this id; None if it is unknown or revoked."""
        return await self._cached(key_id, lambda cursor: cursor.row(_BY_ID, {"id": key_id}))

    async def _cached(self, name: bytes | str, query: Callable[[Cursor], Row | None]) -> KeyRecord | None:
        cached = self._found.get(name)
        if cached is not None and cached[1] > time.monotonic():
            return cached[0]
        row = await self._database.read(query)
        if row is None:
            self._found.pop(name, None)
            return None
        if len(self._found) >= _CACHE_SIZE:
            self._found.clear()
        record = _KEY.record(row)
        self._found[name] = (record, time.monotonic() + self._cache_seconds)
        return record

    def secret_for(self, purpose: str) -> bytes:
        """Return the secret with which the server signs things for one purpose. It is derived from its own secret."""
        return self._hash(b"secret", purpose)

    def open_tenant(self, key: str) -> str:
        """Return the tenant of a key in open mode. It depends only on the key and the server's secret."""
        return f"tenant-{self._hash(b'tenant', key).hex()[:24]}"

    def _hash(self, purpose: bytes, key: str) -> bytes:
        # BLAKE2's own keyed mode takes a microsecond, an HMAC a dozen, and this runs for every request.
        return hashlib.blake2b(purpose + b":" + key.encode(), digest_size=32, key=self._secret).digest()


def _new_tenant() -> str:
    return f"tenant-{secrets.token_hex(12)}"


def _by_hash(cursor: Cursor, key_hash: bytes) -> Row | None:
    row = cursor.row(_BY_HASH, {"key_hash": key_hash})
    return row if row is not None and hmac.compare_digest(bytes(row["key_hash"]), key_hash) else None
