"""Identity of callers: API keys, the short-lived tokens that clients exchange them for, and signed addresses.

A token (``auth.jwt``) stands for the key that it was issued for: once the key is revoked, the token is refused. A
signed address can be fetched without a key until it expires, and gives access only to what it names. It too is refused
once the key that asked for it is revoked.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import jwt

from twinkle.errors import ForbiddenError, UnauthorizedError, UnsupportedError
from twinkle.server.config import ServerConfig
from twinkle.server.state.records.keys import Keys
from twinkle.server.state.store import Store

_TOKEN_PURPOSE = "tokens of clients"
FROM_VARIABLES = "clients send the key in TINKER_API_KEY (Tinker's SDK) or TWINKLE_SERVER_TOKEN (twinkle_client)"


@dataclass(frozen=True)
class KeyDescription:
    """The facts about a key that its holder may see. ``key_id`` is None in open mode, where any key is accepted."""

    key_id: str | None
    name: str
    tenant_id: str

    @property
    def number(self) -> int:
        """Return a number made from the key's id, in open mode from the tenant's, for clients that expect one."""
        return int((self.key_id or self.tenant_id).rpartition("-")[2][:15], 16)


class Identity:
    def __init__(self, config: ServerConfig, keys: Keys) -> None:
        self._auth = config.auth
        self._is_open = config.auth_mode == "open"
        self._keys = keys
        self._secret = keys.secret_for(_TOKEN_PURPOSE)

    async def identify(self, key: str | None, prefix: str = "tml-") -> KeyDescription:
        """Return the key of a request and its tenant. ``key`` is an API key, or a token that stands for one.

        An API key must begin with ``prefix``. In open mode each such key is a tenant of its own; otherwise it must be
        a valid key of this server. UnauthorizedError if these conditions are not met.
        """
        if self._is_token(key):
            return await self._read(key)
        if not key or not key.startswith(prefix):
            which = f"an API key that begins with {prefix}" if prefix else "an API key"
            raise UnauthorizedError(f"{which}, as X-API-Key or Authorization: Bearer; {FROM_VARIABLES}")
        if self._is_open:
            return KeyDescription(None, "any key", self._keys.open_tenant(key))
        record = await self._keys.find(key)
        if record is None:
            raise UnauthorizedError(f"a key of this server (twinkle-server keys create); {FROM_VARIABLES}")
        return KeyDescription(record.key_id, record.name or record.key_id, record.tenant_id)

    async def is_valid(self, key_id: str | None) -> bool:
        """Return whether a key with this id exists and is not revoked. In open mode the answer is always True."""
        if self._is_open:
            return True
        return key_id is not None and await self._keys.find_by_id(key_id) is not None

    async def describe(self, key: str | None) -> KeyDescription:
        """Describe a key. A token is refused: it must not be exchanged for another token or used to revoke its key."""
        if self._is_token(key):
            raise UnauthorizedError("the API key itself, not a token that was issued for it")
        return await self.identify(key)

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
        """Revoke the given key, with which the request was sent; UnsupportedError in open mode."""
        described = await self.describe(key)
        if described.key_id is None:
            raise UnsupportedError("auth/apikey/me: auth.mode is open, where any key will do: none can be revoked")
        await self._keys.revoke(described.key_id, time.time())

    def _is_token(self, key: str | None) -> TypeGuard[str]:
        return self._auth.jwt and key is not None and key.startswith(_TOKEN_PREFIX)

    async def _read(self, token: str) -> KeyDescription:
        """Return the key that a token stands for.

        UnauthorizedError if the token is not ours or has expired, or the key is revoked.
        """
        claims = read_token(token, self._secret)
        if claims is None or claims["exp"] <= time.time():
            raise UnauthorizedError("a token of this server that has not expired (POST auth/token with an API key)")
        if not await self.is_valid(claims["key_id"]):
            raise UnauthorizedError(f"a token whose key is still valid; {FROM_VARIABLES}")
        return KeyDescription(claims["key_id"], "a token", str(claims["sub"]))


Use = Literal["archive", "external_weights", "trace"]

_URL_PURPOSE = "addresses"


class SignedUrls:
    """Signs and checks the token in an address, which is valid for ``seconds``.

    ``use`` prevents that an address of one kind is used as another.
    """

    def __init__(self, store: Store, identity: Identity, seconds: float) -> None:
        self._seconds = seconds
        self._secret = store.keys.secret_for(_URL_PURPOSE)
        self._identity = identity

    def sign(self, use: Use, key_id: str | None, claims: Mapping[str, str]) -> tuple[str, float]:
        """Return a token and the time when it expires. ``key_id``: the key that asked for the address."""
        expires = float(int(time.time() + self._seconds))
        return write_token({**claims, "use": use, "key_id": key_id, "exp": expires}, self._secret), expires

    async def read(self, use: Use, token: str) -> Mapping[str, Any]:
        """Return the claims of a token.

        ForbiddenError if it is not ours, is for another use, has expired, or its key was revoked.
        """
        claims = read_token(token, self._secret)
        if claims is None or claims["use"] != use:
            raise ForbiddenError("this address was not signed by this server, or was changed: ask for a new one")
        if claims["exp"] <= time.time():
            raise ForbiddenError("this address has expired: ask for a new one")
        if not await self._identity.is_valid(claims.get("key_id")):  # addresses of earlier versions name no key
            raise ForbiddenError("this address was made with a key that was revoked: ask for a new one")
        return claims


# --- JSON Web Tokens --------------------------------------------------------------------------------------------------
# Tokens are signed with HMAC-SHA256 and a secret that only this server has. The holder of a token can read its claims
# but cannot change them. There is one algorithm: a token that names another one is refused.

_ALGORITHM = "HS256"
_TOKEN_PREFIX = "eyJ"


def write_token(claims: Mapping[str, object], secret: bytes) -> str:
    return jwt.encode(dict(claims), secret, _ALGORITHM)


def read_token(token: str, secret: bytes) -> Mapping[str, Any] | None:
    """Return the claims of a token; None if it was not signed with this secret.

    The caller checks "exp", because its error message says what has expired. "iat" is not checked: it is for clients,
    and a clock that was set back is no reason to refuse a token.
    """
    try:
        return jwt.decode(token, secret, [_ALGORITHM], {"verify_exp": False, "verify_iat": False})
    except (jwt.InvalidTokenError, ValueError, RecursionError):  # the last two: for text that is nothing like a token
        return None
