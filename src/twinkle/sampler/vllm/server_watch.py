"""Ends vLLM's processes when the server's process is gone, even if that was killed and could not shut them down.

Without this, vLLM would leave its processes behind, with all their memory. Each process that runs our logits processor
watches the server and kills itself; vLLM's other processes end when they notice that.
"""

import os
import select
import signal
from threading import Thread


def end_with(server: int) -> None:
    """Start a thread that kills this process as soon as the process with the id ``server`` is gone."""
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
