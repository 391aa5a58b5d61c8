"""Who is asking: API keys, and the short-lived tokens that clients exchange them for.

A token (``auth.jwt``) stands for the key that it was issued for: once the key is revoked, it is worth nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.errors import UnauthorizedError, UnsupportedError
from twinkle.server.config.sections import AuthConfig
from twinkle.server.gateway.signed_tokens import TOKEN_PREFIX, read_token, write_token
from twinkle.server.state import Keys

_PURPOSE = "tokens of clients"


@dataclass(frozen=True)
class KeyDescription:
    """What the holder of a key may know of it. ``key_id`` is None where keys are not issued."""

    key_id: str | None
    name: str
    tenant_id: str

    @property
    def number(self) -> int:
        """Tells keys apart where a client wants a number."""
        return int((self.key_id or self.tenant_id).rpartition("-")[2][:15], 16)


class Identity:
    def __init__(self, auth: AuthConfig, keys: Keys) -> None:
        self._auth = auth
        self._keys = keys
        self._secret = keys.secret_for(_PURPOSE)

    async def tenant(self, key: str | None, prefix: str = "tml-") -> str:
        """The owner of an API key or token; without configured keys every key is a tenant of its own."""
        if key is not None and self._is_token(key):
            return str((await self._claims(key))["sub"])
        return (await self._described(key, prefix)).tenant_id

    async def key_id(self, key: str | None, prefix: str = "tml-") -> str | None:
        """Return the id of the key that a request came with, or that its token was issued for.

        None where keys are not issued (``auth.mode: open``).
        """
        if key is not None and self._is_token(key):
            claimed: str | None = (await self._claims(key))["key_id"]
            return claimed
        return (await self._described(key, prefix)).key_id

    async def is_valid(self, key_id: str | None) -> bool:
        """Return whether the key with this id still opens what was made with it; in open mode there are no keys."""
        if self._auth.mode == "open":
            return True
        return key_id is not None and await self._keys.find_by_id(key_id) is not None

    async def describe(self, key: str | None) -> KeyDescription:
        """Of a key itself: a token says nothing of its key, and is not exchanged for another one."""
        if key is not None and self._is_token(key):
            raise UnauthorizedError("the API key itself, not a token that was issued for it")
        return await self._described(key, "tml-")

    async def issue_token(self, key: str | None) -> str:
        described = await self.describe(key)
        if not self._auth.jwt:
            raise UnsupportedError("auth/token: no tokens are issued here (auth.jwt is off): send the API key itself")
        now = time.time()
        claims = {
            "iss": "twinkle",
            "sub": described.tenant_id,
            "org_id": described.tenant_id,
            "key_id": described.key_id,
            "iat": int(now),
            "exp": int(now + self._auth.jwt_seconds),
        }
        return write_token(claims, self._secret)

    async def revoke(self, key: str | None) -> None:
        """Make the key useless that the request came with."""
        described = await self.describe(key)
        if described.key_id is None:
            raise UnsupportedError("auth/apikey/me: auth.mode is open, where any key will do: none can be revoked")
        await self._keys.revoke(described.key_id, time.time())

    def _is_token(self, key: str) -> bool:
        return self._auth.jwt and key.startswith(TOKEN_PREFIX)

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """Return what a token of ours says, while it and its key are valid."""
        claims = read_token(token, self._secret)
        if claims is None or claims["exp"] <= time.time():
            raise UnauthorizedError("a token of this server that has not expired (POST auth/token with an API key)")
        if not await self.is_valid(claims["key_id"]):
            raise UnauthorizedError("a token whose key is still valid")
        return claims

    async def _described(self, key: str | None, prefix: str) -> KeyDescription:
        if not key or not key.startswith(prefix):
            which = f"an API key that begins with {prefix}" if prefix else "an API key"
            raise UnauthorizedError(f"{which}, as X-API-Key or Authorization: Bearer")
        if self._auth.mode == "open":
            return KeyDescription(None, "any key", self._keys.open_tenant(key))
        record = await self._keys.find(key)
        if record is None:
            raise UnauthorizedError("a key of this server (twinkle-server keys create)")
        return KeyDescription(record.key_id, record.name or record.key_id, record.tenant_id)
