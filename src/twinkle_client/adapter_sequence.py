"""The numbers of an adapter's requests, 1, 2, …: by them the server keeps their order and knows what it has done.

One request of an adapter is under way at a time. While it is not known what became of one (its connection was lost for
too long, or the program was interrupted), its number is not given to another: the same request again gets the same
number, and before any other the open one is sent once more. The server answers it from memory if it has done it.
"""

import threading
from collections.abc import Callable
from typing import Any

from twinkle_client.errors import InvalidRequestError, ResponseError

__all__ = ["AdapterSequence"]

Post = Callable[[str, bytes], Any]

# With these the server refused a request before it looked at its number.
_NUMBER_UNUSED = frozenset({401, 403, 404, 408, 410, 413, 429, 502, 503, 504})


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
            self._open = None
            if error.status not in _NUMBER_UNUSED:
                self._number += 1
            raise
        self._open = None
        self._number += 1
        return answer


def _numbered(body: bytes, number: int) -> bytes:
    return b'%s,"seq_id":%d}' % (body[:-1], number)
