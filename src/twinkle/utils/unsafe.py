"""Check whether remote code may run in this process: plugins from a hub, functions sent by a client.

It may run only if TWINKLE_TRUST_REMOTE_CODE is on.
"""

from collections.abc import Iterable, Mapping

from twinkle.environment import read_environment
from twinkle.errors import UnsupportedError

__all__ = ["check_unsafe", "trust_remote_code"]


def trust_remote_code() -> bool:
    """Return whether TWINKLE_TRUST_REMOTE_CODE is on."""
    return read_environment().trust_remote_code


def check_unsafe(*args: object, **kwargs: object) -> None:
    """Raise if a callable (function, class, …) is among the arguments, also in containers, unless code is trusted."""
    if trust_remote_code():
        return
    for name, value in [*enumerate(args), *kwargs.items()]:
        found = _first_callable(value)
        if found is not None:
            raise UnsupportedError(
                f"argument {name!r} holds a function or class ({found!r}), and remote code is not trusted here: set "
                "TWINKLE_TRUST_REMOTE_CODE=1 to allow it, or give the name of something built in"
            )


def _first_callable(value: object) -> object | None:
    if callable(value):
        return value
    children: Iterable[object] = ()
    if isinstance(value, Mapping):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = value
    return next((found for child in children if (found := _first_callable(child)) is not None), None)
