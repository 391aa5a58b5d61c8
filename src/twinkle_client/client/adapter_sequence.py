"""The sequence numbers of an adapter's requests: 1, 2, …

The server runs the requests of an adapter in the order of their numbers. If a number comes again with the same body, it
returns the stored outcome instead of running the request again.

One request of an adapter is in flight at a time. If its outcome is unknown (the connection was lost for too long, the
server was down, or the program was interrupted), the request stays open and its number is not given to another request.
Sending the same request again uses the same number. Before any other request, the open one is sent once more. Example:
``step`` is sent as number 7 and the connection breaks; the next ``forward`` first sends ``step`` as number 7 again, and
then goes out as number 8.

A number that the server never accepted must be given to the next request, because the server runs number 8 only after
number 7. An answer to a request that the server accepted, done or failed, carries the number (``X-Twinkle-Seq-Id``). An
error without it means that the request was refused earlier (no such session, no such adapter, too large, too many
requests, a full disk), and its number is still free. Exceptions are the statuses in ``_FATE_UNKNOWN``, which leave the
request open, and those in :func:`_took_number`.
"""

import threading
from collections.abc import Callable
from typing import Any

from twinkle_client.errors import InvalidRequestError, ResponseError

__all__ = ["AdapterSequence"]

Post = Callable[[str, bytes], Any]

# Statuses of a server that is stopping or starting, or of a proxy in front of it: the server may have the request.
_FATE_UNKNOWN = frozenset({408, 502, 503, 504, *range(520, 600)})
# The server has this number with another body: the number is used.
_CONFLICT = 409


class AdapterSequence:
    """Sends the requests of one adapter, one at a time, and numbers them. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 1
        self._open: tuple[str, bytes] | None = None

    def send(self, path: str, body: bytes, post: Post) -> Any:
        """Send a request and return its answer; first send an open request again, if it is another one.

        ``body``: a JSON object with at least one key, to which the number is added.
        """
        with self._lock:
            if self._open is not None and self._open != (path, body):
                self._settle(post)
            return self._send(path, body, post)

    def _settle(self, post: Post) -> None:
        """Send the open request again, to learn its outcome. The answer is dropped: its caller has seen an error."""
        assert self._open is not None
        try:
            self._send(*self._open, post)
        except (InvalidRequestError, ResponseError):
            if self._open is not None:  # its outcome is still unknown
                raise

    def _send(self, path: str, body: bytes, post: Post) -> Any:
        self._open = (path, body)
        try:
            answer = post(path, _numbered(body, self._number))
        except (InvalidRequestError, ResponseError) as error:
            if error.seq_id is None and error.status in _FATE_UNKNOWN:
                raise
            self._open = None
            if _took_number(error):
                self._number += 1
            raise
        self._open = None
        self._number += 1
        return answer


def _took_number(error: InvalidRequestError | ResponseError) -> bool:
    """Return whether the server has used the number. An unreadable answer with status 2xx means that it has."""
    return error.seq_id is not None or error.status == _CONFLICT or 200 <= (error.status or 0) < 300


def _numbered(body: bytes, number: int) -> bytes:
    return b'%s,"seq_id":%d}' % (body[:-1], number)
