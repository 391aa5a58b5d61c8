"""Text that only this server can have written: JSON Web Tokens, signed with HMAC-SHA256.

Everyone who holds a token can read its claims, and no one can change them. There is one algorithm: a token that names
another is not ours.
"""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["TOKEN_PREFIX", "read_token", "write_token"]


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


_HEADER = _encode(json.dumps({"alg": "HS256", "typ": "JWT"}, separators=(",", ":")).encode())
TOKEN_PREFIX = "eyJ"


def write_token(claims: Mapping[str, object], secret: bytes) -> str:
    signed = f"{_HEADER}.{_encode(json.dumps(dict(claims), separators=(',', ':')).encode())}"
    return f"{signed}.{_encode(_signature(signed, secret))}"


def read_token(token: str, secret: bytes) -> Mapping[str, Any] | None:
    """Return what the token claims; None if it was not written with this secret."""
    signed, _, signature = token.rpartition(".")
    header, _, payload = signed.partition(".")
    if header != _HEADER or not token.isascii():
        return None
    try:
        if not hmac.compare_digest(_decode(signature), _signature(signed, secret)):
            return None
        claims = json.loads(_decode(payload))
    except (binascii.Error, ValueError):
        return None
    assert isinstance(claims, dict), "we signed it"
    return claims


def _signature(signed: str, secret: bytes) -> bytes:
    return hmac.digest(secret, signed.encode(), hashlib.sha256)
