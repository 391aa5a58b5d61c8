"""The one module of the client that reads environment variables.

TWINKLE_SERVER_URL    the server's address (default http://127.0.0.1:8000)
TWINKLE_SERVER_TOKEN  the API key (default EMPTY_TOKEN: a server that issues no keys accepts any token)

and, for the tinker SDK, TINKER_BASE_URL and TINKER_API_KEY: see :func:`set_tinker_variables`. Proxies are taken from
the system's settings, or from HTTP_PROXY and similar variables.
"""

import os
from dataclasses import dataclass
from urllib.request import getproxies

__all__ = ["Environment", "has_tls_proxy", "read_environment", "set_tinker_variables", "tinker_key"]

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TOKEN = "EMPTY_TOKEN"


@dataclass(frozen=True)
class Environment:
    server_url: str
    server_token: str


def read_environment() -> Environment:
    """Read the variables now: scripts may set them after import."""
    return Environment(
        server_url=os.environ.get("TWINKLE_SERVER_URL", "").strip() or DEFAULT_URL,
        server_token=os.environ.get("TWINKLE_SERVER_TOKEN", "").strip() or DEFAULT_TOKEN,
    )


def has_tls_proxy() -> bool:
    """Return whether a proxy is configured whose own address is https, so that requests to any server may need TLS."""
    return any(address.lower().startswith("https:") for address in getproxies().values())


def set_tinker_variables(base_url: str | None, api_key: str | None) -> None:
    """Set the variables that the tinker SDK reads. The SDK appends /api/v1 to the address itself."""
    url = base_url or os.environ.get("TWINKLE_SERVER_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_URL
    os.environ["TINKER_BASE_URL"] = url.rstrip("/").removesuffix("/api/v1")
    key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or os.environ.get("TINKER_API_KEY") or DEFAULT_TOKEN
    os.environ["TINKER_API_KEY"] = key


def tinker_key() -> str:
    """Return the key in TINKER_API_KEY, which :func:`set_tinker_variables` sets, else the default token."""
    return os.environ.get("TINKER_API_KEY") or DEFAULT_TOKEN
