"""The one place of the client that reads environment variables.

TWINKLE_SERVER_URL    where the server is (default http://127.0.0.1:8000)
TWINKLE_SERVER_TOKEN  who asks (default EMPTY_TOKEN: a server that issues no keys takes any token)

and, for the tinker SDK, TINKER_BASE_URL and TINKER_API_KEY: see :func:`set_tinker_variables`. Proxies are those of the
system, or of HTTP_PROXY and its like.
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
    """Whether requests may go through a proxy that is spoken to by TLS, whatever the server's address is."""
    return any(address.lower().startswith("https:") for address in getproxies().values())


def set_tinker_variables(base_url: str | None, api_key: str | None) -> None:
    """What the tinker SDK reads. It appends /api/v1 to the address itself."""
    url = base_url or os.environ.get("TWINKLE_SERVER_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_URL
    os.environ["TINKER_BASE_URL"] = url.rstrip("/").removesuffix("/api/v1")
    key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or os.environ.get("TINKER_API_KEY") or DEFAULT_TOKEN
    os.environ["TINKER_API_KEY"] = key


def tinker_key() -> str:
    """What :func:`set_tinker_variables` said, unless somebody else said otherwise since."""
    return os.environ.get("TINKER_API_KEY") or DEFAULT_TOKEN
