"""vLLM's processes end with the server's, even when that is killed and can tell nobody.

vLLM itself leaves them behind then, with all their memory. One of them ends when the server has gone; the others notice
that.
"""

import os
import select
import signal
from threading import Thread


def end_with(server: int) -> None:
    """Kill this process as soon as the process ``server`` is gone."""
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
