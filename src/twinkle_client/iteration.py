"""Iterators that live on the server. Their end is a 410, and only here does that become StopIteration."""

from typing import Any

from twinkle_client.errors import GoneError
from twinkle_client.remote import RemoteObject

__all__ = ["next_of"]

_EXHAUSTED = "iterator exhausted"


def next_of(iterator: RemoteObject, **arguments: Any) -> Any:
    """The next item. A session or a batch that is gone is gone, not an end."""
    try:
        return iterator.call("__next__", **arguments)
    except GoneError as error:
        if _EXHAUSTED not in error.detail.lower():
            raise
    raise StopIteration
