"""Addresses that can be fetched without a key, for a while: whoever has one may read what it names, nothing else.

An address is worth as much as the key that it was asked for with: it ends with that key.
"""

import time
from collections.abc import Mapping
from typing import Any, Literal

from twinkle.errors import ForbiddenError
from twinkle.server.gateway.identity import Identity
from twinkle.server.gateway.signed_tokens import read_token, write_token
from twinkle.server.state import Store

Use = Literal["archive", "external_weights", "trace"]

_PURPOSE = "addresses"
_VALID_SECONDS = 3600.0


class SignedUrls:
    """The signed part of addresses. ``use`` keeps one kind of address from being taken for another."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._secret = store.keys.secret_for(_PURPOSE)
        self._identity = identity

    def sign(self, use: Use, key_id: str | None, claims: Mapping[str, str]) -> tuple[str, float]:
        """Return a token and until when it is good. ``key_id``: of the key that asked for it."""
        expires = float(int(time.time() + _VALID_SECONDS))
        return write_token({**claims, "use": use, "key_id": key_id, "exp": expires}, self._secret), expires

    async def read(self, use: Use, token: str) -> Mapping[str, Any]:
        """Return the claims of a token of ours; ForbiddenError if it has expired or its key was revoked."""
        claims = read_token(token, self._secret)
        if claims is None or claims["use"] != use:
            raise ForbiddenError("this address was not signed by this server, or was changed: ask for a new one")
        if claims["exp"] <= time.time():
            raise ForbiddenError("this address has expired: ask for a new one")
        if not await self._identity.is_valid(claims.get("key_id")):  # addresses of earlier versions name no key
            raise ForbiddenError("this address was made with a key that was revoked: ask for a new one")
        return claims
