"""The numbers of an adapter's requests, 1, 2, …: by them the server keeps their order and knows what it has done.

One request of an adapter is under way at a time. While it is not known what became of one (its connection was lost for
too long, the server was away, or the program was interrupted), its number is not given to another: the same request
again gets the same number, and before any other the open one is sent once more. The server answers it from memory if it
has done it.

A number that the server never used must be given to the next request, or that one waits for it in vain. What the server
took, done or refused, it answers with the number; what it refused before that (no such session, no such adapter, too
large, too much at once, a full disk) has none.
"""

import threading
from collections.abc import Callable
from typing import Any

from twinkle_client.errors import InvalidRequestError, ResponseError

__all__ = ["AdapterSequence"]

Post = Callable[[str, bytes], Any]

# Of the server that is going down or coming back, or of a proxy before it: the request may have arrived all the same.
_FATE_UNKNOWN = frozenset({408, 502, 503, 504, *range(520, 600)})
# The number is another request's, whatever this one was.
_CONFLICT = 409


class AdapterSequence:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 1
        self._open: tuple[str, bytes] | None = None

    def send(self, path: str, body: bytes, post: Post) -> Any:
        """``body``: a JSON object with at least one key, to which the number is added."""
        with self._lock:
            if self._open is not None and self._open != (path, body):
                self._settle(post)
            return self._send(path, body, post)

    def _settle(self, post: Post) -> None:
        """The caller of the open request has given up on its answer, whatever it is."""
        assert self._open is not None
        try:
            self._send(*self._open, post)
        except (InvalidRequestError, ResponseError):
            if self._open is not None:  # still nobody knows
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
    """Also of an answer that says it was done, and cannot be read."""
    return error.seq_id is not None or error.status == _CONFLICT or 200 <= (error.status or 0) < 300


def _numbered(body: bytes, number: int) -> bytes:
    return b'%s,"seq_id":%d}' % (body[:-1], number)
