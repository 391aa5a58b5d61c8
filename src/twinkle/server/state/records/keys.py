"""API keys and whose they are. A key is shown once, when it is made, and stored nowhere: only its keyed hash is.

The hashes' secret lies beside the database in a file of its own (``state.integrity.copies``), so that neither
alone says anything about a key.
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

KEY_PREFIX = "tml-"

_CACHE_SECONDS = 10.0  # how long a key that another process revoked may still work
_CACHE_SIZE = 4096

_WORKS = API_KEYS.c.revoked_at.is_(None)
_OF_ID = API_KEYS.c.key_id == bindparam("id")
_LIST = select(API_KEYS).order_by(API_KEYS.c.created_at, API_KEYS.c.key_id)
_BY_HASH = select(API_KEYS).where(API_KEYS.c.key_hash == bindparam("key_hash"), _WORKS)
_BY_ID = select(API_KEYS).where(_OF_ID, _WORKS)
_REVOKE = update(API_KEYS).where(_OF_ID, _WORKS).values(revoked_at=bindparam("now"))


@dataclass(frozen=True)
class KeyRecord:
    """What is known of a key. ``revoked_at`` is None while it works."""

    key_id: str
    tenant_id: str
    name: str
    created_at: float
    revoked_at: float | None = None


_KEY = RecordMapper(KeyRecord, API_KEYS)


class Keys(Area):
    """Configured keys belong to the tenant they were made for; in open mode any key is a tenant of its own."""

    def __init__(self, database: Database, secret: bytes) -> None:
        super().__init__(database)
        self._secret = secret
        # By hash, or id: what we found and until when we believe it.
        self._found: dict[bytes | str, tuple[KeyRecord, float]] = {}

    async def create(self, tenant_id: str | None, name: str, now: float) -> tuple[KeyRecord, str]:
        """Return a new key and its record; without a tenant, the key of a new tenant."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        record = KeyRecord(
            key_id=f"key-{secrets.token_hex(8)}",
            tenant_id=f"tenant-{secrets.token_hex(12)}" if tenant_id is None else tenant_id,
            name=name,
            created_at=now,
        )

        def work(cursor: Cursor) -> None:
            _KEY.insert(cursor, record, key_hash=self._hash(b"key", key))
            add_entry(cursor, record.tenant_id, "key_create", now, {"key_id": record.key_id, "name": name})

        await self._database.write(work)
        return record, key

    async def list(self) -> tuple[KeyRecord, ...]:
        """Return all keys, oldest first, revoked ones too."""
        return await self._all(_KEY, _LIST)

    async def revoke(self, key_id: str, now: float) -> bool:
        """Revoke a key; returns whether there was such a key. Other processes notice within seconds."""

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
        """Return the record of a configured key; None if the key is unknown or revoked."""
        key_hash = self._hash(b"key", key)
        return await self._cached(key_hash, lambda cursor: _by_hash(cursor, key_hash))

    async def find_by_id(self, key_id: str) -> KeyRecord | None:
        """Return the record of a configured key by the key's id; None if it is unknown or revoked."""
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
        self._found[name] = (record, time.monotonic() + _CACHE_SECONDS)
        return record

    def secret_for(self, purpose: str) -> bytes:
        """Return a secret for one kind of thing that the server signs."""
        return self._hash(b"secret", purpose)

    def open_tenant(self, key: str) -> str:
        """Return the tenant that a key stands for in open mode: a function of the key and our secret alone."""
        return f"tenant-{self._hash(b'tenant', key).hex()[:24]}"

    def _hash(self, purpose: bytes, key: str) -> bytes:
        # BLAKE2's own keyed mode: a microsecond, where an HMAC takes a dozen, and every request comes here.
        return hashlib.blake2b(purpose + b":" + key.encode(), digest_size=32, key=self._secret).digest()


def _by_hash(cursor: Cursor, key_hash: bytes) -> Row | None:
    row = cursor.row(_BY_HASH, {"key_hash": key_hash})
    return row if row is not None and hmac.compare_digest(bytes(row["key_hash"]), key_hash) else None
