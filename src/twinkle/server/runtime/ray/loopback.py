"""Keep a replica from listening to the network where its cluster does not.

Every Serve replica opens a port on all interfaces for calls over gRPC. Serve itself says that only its tests make such
calls, and has no setting for the port. On a cluster of this machine alone it is closed before the replica is used.
"""

import contextlib
import os
import socket
from pathlib import Path

import ray

from twinkle.server.config.sections import names_this_machine

__all__ = ["LoopbackOnly"]

_EVERYWHERE = ("0.0.0.0", "::")


class LoopbackOnly:
    """Closes that port once, on a cluster whose address is the loopback one; elsewhere it does nothing."""

    def __init__(self) -> None:
        self._is_done = not names_this_machine(ray.util.get_node_ip_address())

    def enforce(self) -> None:
        """To be called from ``check_health``: Serve asks for it after the port was opened and before any request."""
        if not self._is_done:
            self._is_done = close_open_listeners() > 0


def close_open_listeners() -> int:
    """Stop all sockets of this process that listen on every interface; return how many there were."""
    closed = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # no socket, or gone
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as listener:
                if _listens_everywhere(listener):
                    listener.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _listens_everywhere(one: socket.socket) -> bool:
    is_listener = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(is_listener) and one.family != socket.AF_UNIX and one.getsockname()[0] in _EVERYWHERE
