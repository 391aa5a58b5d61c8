"""Addresses that can be fetched without a key, for a while: whoever has one may read what it names, nothing else."""

import time
from collections.abc import Mapping
from typing import Any, Literal

from twinkle.errors import ForbiddenError
from twinkle.server.signed_tokens import read_token, write_token
from twinkle.server.state import Store

Use = Literal["archive", "external_weights", "trace"]

_PURPOSE = "addresses"
_VALID_SECONDS = 3600.0


class SignedUrls:
    """The signed part of addresses. ``use`` keeps one kind of address from being taken for another."""

    def __init__(self, store: Store) -> None:
        self._secret = store.keys.secret_for(_PURPOSE)

    def sign(self, use: Use, **claims: str) -> tuple[str, float]:
        """The token and until when it is good."""
        expires = float(int(time.time() + _VALID_SECONDS))
        return write_token({**claims, "use": use, "exp": expires}, self._secret), expires

    def read(self, use: Use, token: str) -> Mapping[str, Any]:
        claims = read_token(token, self._secret)
        if claims is None or claims["use"] != use:
            raise ForbiddenError("this address was not signed by this server, or was changed: ask for a new one")
        if claims["exp"] <= time.time():
            raise ForbiddenError("this address has expired: ask for a new one")
        return claims
