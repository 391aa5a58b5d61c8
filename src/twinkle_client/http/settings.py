"""The server, the API key and the session that the functions of :mod:`twinkle_client.http` use."""

import secrets
import time
from dataclasses import dataclass

from twinkle_client.client.current import current_client
from twinkle_client.client.transport import with_api
from twinkle_client.environment import read_environment

__all__ = [
    "get_api_key",
    "get_base_url",
    "get_request_id",
    "get_session_id",
    "set_api_key",
    "set_base_url",
    "set_request_id",
    "set_session_id",
]


@dataclass
class _Configured:
    """The values that a script has set here; None: not set."""

    base_url: str | None = None
    api_key: str | None = None
    session_id: str | None = None
    request_id: str | None = None


_configured = _Configured()


def set_base_url(url: str | None) -> None:
    _configured.base_url = url


def get_base_url() -> str:
    """Return the server's address with /api/v1."""
    client = current_client()
    if _configured.base_url is not None or client is None:
        return with_api(_configured.base_url or read_environment().server_url)
    return client.base_url


def set_api_key(key: str | None) -> None:
    _configured.api_key = key


def get_api_key() -> str:
    client = current_client()
    if _configured.api_key is not None or client is None:
        return _configured.api_key or read_environment().server_token
    return client.api_key


def set_session_id(session_id: str | None) -> None:
    _configured.session_id = session_id


def get_session_id() -> str | None:
    client = current_client()
    return _configured.session_id if _configured.session_id is not None or client is None else client.session_id


def set_request_id(request_id: str | None) -> None:
    _configured.request_id = request_id


def get_request_id() -> str:
    """Return the id by which some servers route all requests of a program to the same process. Ours ignores it."""
    if _configured.request_id is None:
        _configured.request_id = f"{time.strftime('%Y%m%d_%H%M%S')}-{secrets.token_hex(4)}"
    return _configured.request_id
