"""The default client, which models, samplers and datasets use unless they are given one."""

import threading
from collections.abc import Mapping
from typing import Any

from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import InvalidRequestError, invalid

__all__ = ["current_client", "default_client", "init_twinkle_client", "initialize"]

_lock = threading.Lock()
_default: TwinkleClient | None = None


def init_twinkle_client(
    base_url: str | None = None,
    api_key: str | None = None,
    session_heartbeat_interval: float = 10,
    *,
    route_prefix: str = "/twinkle",
    session_metadata: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    retry_deadline: float = 300.0,
    seed: int | None = None,
) -> TwinkleClient:
    """Return a new :class:`TwinkleClient` and make it the default. Objects that use an earlier one keep it."""
    global _default
    client = TwinkleClient(
        base_url,
        api_key,
        session_heartbeat_interval,
        route_prefix=route_prefix,
        session_metadata=session_metadata,
        timeout=timeout,
        retry_deadline=retry_deadline,
        seed=seed,
    )
    with _lock:
        _default = client
    return client


def initialize(
    mode: str = "local",
    seed: int | None = 42,
    full_determinism: bool = False,
    name: str | None = None,
    groups: object = None,
) -> TwinkleClient:
    """Create the default client; the counterpart of ``twinkle.initialize`` for scripts that moved to a server.

    The server is that of TWINKLE_SERVER_URL. Adapters get seeds derived from ``seed``, shuffling dataloaders
    ``seed`` itself, unless they are given one; ``name`` is stored with the session.
    """
    if mode != "local":
        raise invalid("mode", mode, "'local': the server decides where it computes")
    if groups is not None:
        raise invalid("groups", groups, "None: the server decides on which processes it computes")
    if full_determinism:
        raise invalid("full_determinism", True, "False: requests of several clients share batches on the server")
    return init_twinkle_client(seed=seed, session_metadata=None if name is None else {"name": name})


def current_client() -> TwinkleClient | None:
    """Return the default client, or None."""
    return _default


def default_client() -> TwinkleClient:
    """Return the default client; raise InvalidRequestError if there is none."""
    if _default is None:
        raise InvalidRequestError(
            "there is no client yet: call init_twinkle_client() (or initialize()) first, or give client=…"
        )
    return _default
