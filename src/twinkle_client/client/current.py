"""The client that models, samplers and datasets use unless they are given one."""

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
    """A :class:`TwinkleClient`, which is the default one from now on; an earlier one goes on with what it has."""
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
    """``twinkle.initialize`` for a script that moved to a server: the default client, of the environment's server.

    The seeds of adapters and of shuffling dataloaders are made from ``seed``; ``name`` is kept with the session.
    """
    if mode != "local":
        raise invalid("mode", mode, "'local': where the server computes is the server's business")
    if groups is not None:
        raise invalid("groups", groups, "None: on which processes the server computes is the server's business")
    if full_determinism:
        raise invalid("full_determinism", True, "False: requests of several clients share batches on the server")
    return init_twinkle_client(seed=seed, session_metadata=None if name is None else {"name": name})


def current_client() -> TwinkleClient | None:
    """The default one, if there is one."""
    return _default


def default_client() -> TwinkleClient:
    if _default is None:
        raise InvalidRequestError(
            "there is no client yet: call init_twinkle_client() (or initialize()) first, or give client=…"
        )
    return _default
