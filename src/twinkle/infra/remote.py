"""``remote_class``: a decorator for classes whose objects can live on worker groups.

A decorated class makes its instances as before, except that under Ray a call with ``remote_group=`` starts workers and
returns a proxy to them. ``instance_id=`` names the component; without it the name is made from the class and a running
number.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any, TypeVar, cast

from twinkle.infra.components import record_component
from twinkle.infra.device_group import find_group
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.initialization import current_settings
from twinkle.infra.remote_spec import (
    Execute,
    RemoteSpec,
    check_execute,
    describe,
    driver_function,
    driver_methods,
    remote_function,
    remote_methods,
)

__all__ = [
    "Execute",
    "RemoteSpec",
    "driver_function",
    "driver_methods",
    "remote_class",
    "remote_function",
    "remote_methods",
]

T = TypeVar("T")

_MESH = "device_mesh"


def remote_class(execute: Execute = "all") -> Callable[[type[T]], type[T]]:
    """Decorate a class that can be constructed on a worker group: on its first worker, or on all of them.

    A constructor that takes ``device_mesh`` and is given none gets the mesh of ``initialize``; on a worker group
    without one, a mesh in which the workers divide the rows. On the first worker alone the mesh always has one rank.
    """
    check_execute(execute)

    def decorate(cls: type[T]) -> type[T]:
        takes_mesh = _MESH in signature(cls).parameters
        _replace_new(cls, execute, takes_mesh)
        _replace_init(cls, takes_mesh)
        for name, spec in remote_methods(cls).items():
            if isinstance(vars(cls).get(name), FunctionType):  # an override is called like the method that it overrides
                describe(vars(cls)[name], spec)
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
