"""The default client, which models, samplers and datasets use unless they are given one, and ``initialize``."""

import logging
import random
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from twinkle_client.client.log_lines import left_to_server, show_log_lines
from twinkle_client.client.session import TwinkleClient
from twinkle_client.environment import processes_of_launch, read_environment
from twinkle_client.errors import InvalidRequestError, invalid

__all__ = ["current_client", "default_client", "find_client", "init_twinkle_client", "initialize", "shutdown"]

logger = logging.getLogger(__name__)

_LARGEST_SEED = 2**32 - 1  # the largest that numpy accepts
_NODE_DEFAULT = 8  # the library's default of nproc_per_node and ncpu_proc_per_node

_lock = threading.Lock()
_default: TwinkleClient | None = None
_chosen_server = False  # whether the program chose the default client's server, by init_twinkle_client


def init_twinkle_client(
    base_url: str | None = None,
    api_key: str | None = None,
    session_heartbeat_interval: float = 10,
    *,
    route_prefix: str = "/twinkle",
    session_metadata: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    retry_deadline: float = 300.0,
    wait_for_limits: float | None = None,
    connect_deadline: float | None = None,
    seed: int | None = None,
) -> TwinkleClient:
    """Return a new :class:`TwinkleClient` and make it the default. Objects that use an earlier one keep it."""
    client = TwinkleClient(
        base_url,
        api_key,
        session_heartbeat_interval,
        route_prefix=route_prefix,
        session_metadata=session_metadata,
        timeout=timeout,
        retry_deadline=retry_deadline,
        wait_for_limits=wait_for_limits,
        connect_deadline=connect_deadline,
        seed=seed,
    )
    return _set_default(client, chosen=True)


def initialize(
    mode: str | None = None,
    nproc_per_node: int = _NODE_DEFAULT,
    ncpu_proc_per_node: int = _NODE_DEFAULT,
    seed: int | None = 42,
    full_determinism: bool = False,
    groups: object = None,
    global_device_mesh: object = None,
    lazy_collect: bool = True,
    name: str | None = None,
    notifier: object = None,
    *,
    wait_for_limits: float | None = None,
) -> TwinkleClient:
    """Do for a script that moved to a server what ``twinkle.initialize`` does locally, and return the default client.

    The client is the one that :func:`init_twinkle_client` made; without such a call, a new one for the server of
    TWINKLE_SERVER_URL. ``seed`` seeds Python, numpy and, if the script has imported it, torch. Adapters get seeds made
    of it and their names, shuffling dataloaders ``seed`` itself, unless they are given one. ``name`` and
    ``wait_for_limits``, which is that of :class:`TwinkleClient`, are for a session that this call opens.

    What chooses a place (``mode``, ``groups`` and so on) is the server's decision; a log line says so.
    """
    if mode not in (None, "local", "ray"):
        raise invalid("mode", mode, "'local' or 'ray', which both mean here that the server decides where it computes")
    if full_determinism:
        raise invalid("full_determinism", True, "False: requests of several clients share batches on the server")
    if notifier is not None:
        raise invalid("notifier", notifier, "None: the client notifies nobody; catch the exception in the script")
    if seed is not None and not 0 <= seed <= _LARGEST_SEED:
        raise invalid("seed", seed, f"an integer from 0 to {_LARGEST_SEED}, or None")
    processes = processes_of_launch()
    if processes > 1:
        raise InvalidRequestError(
            f"WORLD_SIZE: got {processes}, allowed: 1, because a script on a server is one process, and the server "
            "decides how many compute; start it with python, not with torchrun"
        )
    show_log_lines()
    left_to_server(
        "initialize",
        mode=None if mode == "local" else mode,
        nproc_per_node=None if nproc_per_node == _NODE_DEFAULT else nproc_per_node,
        ncpu_proc_per_node=None if ncpu_proc_per_node == _NODE_DEFAULT else ncpu_proc_per_node,
        groups=groups,
        global_device_mesh=global_device_mesh,
        lazy_collect=None if lazy_collect else lazy_collect,
    )
    if seed is not None:
        _seed_everything(seed)
    client = current_client()
    if client is None or client.closed or not _chosen_server:
        metadata = None if name is None else {"name": name}
        client = _set_default(TwinkleClient(session_metadata=metadata, wait_for_limits=wait_for_limits), chosen=False)
    client.seed = seed
    logger.info(
        "%s: server %s, session %s, seed %s", name or "twinkle_client", client.base_url, client.session_id, seed
    )
    return client


def shutdown() -> None:
    """End the session of the default client, if there is one."""
    client = current_client()
    if client is not None:
        client.close()


def current_client() -> TwinkleClient | None:
    """Return the default client, or None."""
    return _default


def find_client() -> TwinkleClient | None:
    """Return the default client; if there is none, a new one for the server of TWINKLE_SERVER_URL, if that is set."""
    if _default is None and read_environment().names_server:
        return _set_default(TwinkleClient(), chosen=False)
    return _default


def default_client() -> TwinkleClient:
    """Return :func:`find_client`; raise InvalidRequestError if there is no client."""
    client = find_client()
    if client is None:
        raise InvalidRequestError(
            "there is no client yet: call init_twinkle_client() (or initialize()) first, set TWINKLE_SERVER_URL, or "
            "give client=…"
        )
    return client


def _set_default(client: TwinkleClient, *, chosen: bool) -> TwinkleClient:
    global _default, _chosen_server
    with _lock:
        _default, _chosen_server = client, chosen
    return client


def _seed_everything(seed: int) -> None:
    """Seed the generators of this process. Torch is not imported for that: only a script that uses it needs it."""
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
