"""How methods are called on worker groups: ``remote_function`` and ``driver_function`` record it on a method.

A decorated method stays the same function; the decorator records how arguments are divided among workers and how
results are combined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeVar, cast, get_args

from twinkle.errors import InvalidInputError
from twinkle.infra.collect import Collect, check_collect
from twinkle.infra.dispatch import Dispatch, check_dispatch

__all__ = [
    "Execute",
    "RemoteSpec",
    "check_execute",
    "describe",
    "driver_function",
    "driver_methods",
    "remote_function",
    "remote_methods",
]

Execute = Literal["first", "peer", "all"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RemoteSpec:
    """How a method is called on a worker group.

    ``execute``: on the first worker, on all, or on those that belong to the calling process (peer). ``sync``: wait for
    the result. ``lazy_collect``: return a promise of the result; None means the setting of ``initialize``. ``timeout``:
    seconds to wait for the result; None means no limit.
    """

    dispatch: Dispatch = "slice"
    execute: Execute = "all"
    collect: Collect = "none"
    sync: bool = False
    lazy_collect: bool | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_dispatch(self.dispatch)
        check_collect(self.collect)
        check_execute(self.execute)


def remote_function(
    dispatch: Dispatch = "slice",
    execute: Execute = "all",
    collect: Collect = "none",
    sync: bool = False,
    lazy_collect: bool | None = None,
    timeout: float | None = None,
) -> Callable[[F], F]:
    """Decorate a method that can be called through a proxy. See :class:`RemoteSpec`, ``dispatch`` and ``collect``.

    Overrides in subclasses are called the same way, unless they are decorated themselves.
    """
    spec = RemoteSpec(dispatch, execute, collect, sync, lazy_collect, timeout)

    def decorate(function: F) -> F:
        describe(function, spec)
        return function

    return decorate


def describe(function: Any, spec: RemoteSpec) -> None:
    """Record on a function how it is called, also under the attribute names that existing scripts read."""
    function.remote_spec = spec
    function._dispatch, function._execute, function._collect = spec.dispatch, spec.execute, spec.collect
    function._sync, function._lazy_collect = spec.sync, spec.lazy_collect


def remote_methods(cls: type) -> dict[str, RemoteSpec]:
    """Return the methods that can be called through a proxy of ``cls``, and how each is called."""
    found: dict[str, RemoteSpec] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and "remote_spec" in vars(value):
                found[name] = vars(value)["remote_spec"]
    return found


def driver_function(function: F) -> F:
    """Decorate a method that runs in the caller's process; for an object on workers, ``self`` is then its proxy."""
    cast("Any", function).on_driver = True
    return function


def driver_methods(cls: type) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and "on_driver" in vars(value)
    }


def check_execute(execute: str) -> None:
    if execute not in get_args(Execute):
        raise InvalidInputError("execute", execute, "'first', 'peer' or 'all'")
