"""``remote_class`` and ``remote_function``: decorators for classes and methods that can run on worker groups.

A decorated method stays the same function; the decorator records on it how arguments are divided among workers and how
results are combined. A decorated class makes its instances as before, except that under Ray a call with
``remote_group=`` starts workers and returns a proxy to them. ``instance_id=`` names the component; without it the name
is made from the class and a running number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any, Literal, TypeVar, cast, get_args

from twinkle.errors import InvalidInputError
from twinkle.infra.collect import Collect, check_collect
from twinkle.infra.components import record_component
from twinkle.infra.device_group import find_group
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Dispatch, check_dispatch
from twinkle.infra.initialization import current_settings

__all__ = [
    "Execute",
    "RemoteSpec",
    "driver_function",
    "driver_methods",
    "remote_class",
    "remote_function",
    "remote_methods",
]

Execute = Literal["first", "peer", "all"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MESH = "device_mesh"


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
        _check_execute(self.execute)


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
        _describe(function, spec)
        return function

    return decorate


def _describe(function: Any, spec: RemoteSpec) -> None:
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


def remote_class(execute: Execute = "all") -> Callable[[type[T]], type[T]]:
    """Decorate a class that can be constructed on a worker group: on its first worker, or on all of them.

    A constructor that takes ``device_mesh`` and is given none gets the mesh of ``initialize``.
    """
    _check_execute(execute)

    def decorate(cls: type[T]) -> type[T]:
        takes_mesh = _MESH in signature(cls).parameters
        _replace_new(cls, execute, takes_mesh)
        _replace_init(cls, takes_mesh)
        for name, spec in remote_methods(cls).items():
            if isinstance(vars(cls).get(name), FunctionType):  # an override is called like the method that it overrides
                _describe(vars(cls)[name], spec)
        return cls

    return decorate


def _replace_new(cls: type, execute: Execute, takes_mesh: bool) -> None:
    make: Any = cls.__new__

    @wraps(cast("Any", cls).__init__)
    def new(
        actual: type, *args: Any, remote_group: str | None = None, instance_id: str | None = None, **kwargs: Any
    ) -> Any:
        if remote_group is not None and current_settings().mode == "ray":
            from twinkle.infra.proxy import start_component

            return start_component(actual, args, kwargs, remote_group, instance_id, execute, takes_mesh)
        return make(actual) if make is object.__new__ else make(actual, *args, **kwargs)

    cast("Any", cls).__new__ = staticmethod(new)


def _replace_init(cls: type, takes_mesh: bool) -> None:
    """Wrap ``__init__``: remove ``remote_group`` and ``instance_id``, which Python passes to it as to ``__new__``."""
    original: Callable[..., None] = cast("Any", cls).__init__

    @wraps(original)
    def init(
        self: object, *args: Any, remote_group: str | None = None, instance_id: str | None = None, **kwargs: Any
    ) -> None:
        settings = current_settings()
        if remote_group is not None and settings.plans:  # no effect in this mode, but it must be the name of a group
            find_group(settings.plans, remote_group)
        if takes_mesh and settings.mode == "local":
            kwargs = _with_mesh(original, self, args, kwargs, settings.mesh)
            group = remote_group if settings.plans else None
            record_component(type(self).__name__, instance_id, group, kwargs.get(_MESH))
        original(self, *args, **kwargs)

    cast("Any", cls).__init__ = init


def _with_mesh(
    init: Callable[..., None], self: object, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh | None
) -> dict[str, Any]:
    by_position = signature(init).bind_partial(self, *args).arguments
    if _MESH in by_position or kwargs.get(_MESH) is not None or mesh is None:
        return kwargs
    return {**kwargs, _MESH: mesh}


def _check_execute(execute: str) -> None:
    if execute not in get_args(Execute):
        raise InvalidInputError("execute", execute, "'first', 'peer' or 'all'")
