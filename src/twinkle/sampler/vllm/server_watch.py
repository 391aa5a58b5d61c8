"""Ends vLLM's processes when the server's process is gone, even if that was killed and could not shut them down.

Without this, vLLM would leave its processes behind, with all their memory. Each worker process watches the server and
kills itself; vLLM's other processes end when they notice that.
"""

import os
import select
import signal
from collections.abc import Mapping
from threading import Thread

# The entry of vLLM's additional_config with the process id of the server that started vLLM.
_SERVER = "twinkle_server"


def server_config() -> dict[str, int]:
    """Return vLLM's additional_config for workers that end with this process."""
    return {_SERVER: os.getpid()}


def end_with_server(additional_config: Mapping[str, int]) -> None:
    """Start a thread that kills this process as soon as the server's process is gone."""
    server = additional_config[_SERVER]
    Thread(target=_wait_and_end, args=(server,), name="server-watch", daemon=True).start()


def _wait_and_end(server: int) -> None:
    try:
        descriptor = os.pidfd_open(server)
    except ProcessLookupError:
        pass  # gone already
    else:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()  # readable once the process has ended
    os.kill(os.getpid(), signal.SIGKILL)
