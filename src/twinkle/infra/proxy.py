"""Proxies: the driver's handles of objects on a worker group.

A proxy has only those methods of the object's class that are remote functions or driver functions (which run in the
caller's process); ``isinstance`` treats it as an instance of the class. A proxy can be sent to workers, where its calls
return results, not promises.
"""

from collections.abc import Callable, Iterator
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from twinkle.errors import InvalidInputError
from twinkle.infra.components import name_component, record_component
from twinkle.infra.device_group import GroupPlan, find_group
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.initialization import Settings, current_settings
from twinkle.infra.remote_spec import Execute, RemoteSpec, driver_methods, remote_methods

if TYPE_CHECKING:
    from twinkle.infra.ray_workers import WorkerGroup

__all__ = ["RemoteProxy", "start_component"]


class RemoteProxy:
    """The base of all proxies. :func:`_proxy_class` makes a subclass of it for each remote class."""

    def __init__(self, remote_class: type, workers: "WorkerGroup") -> None:
        self._remote_class = remote_class
        self._workers = workers

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._remote_class

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._workers.mesh

    @property
    def remote_group(self) -> str:
        return self._workers.origin.group

    @property
    def instance_id(self) -> str:
        return self._workers.origin.component

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # optional attributes that pickle and others probe for
            raise AttributeError(name)
        known = ", ".join(sorted(remote_methods(self._remote_class)))
        raise AttributeError(
            f"{self._remote_class.__name__}.{name} is not a remote function, and the object is on the workers of group "
            f"{self.remote_group!r}; remote functions: {known}"
        )

    def __repr__(self) -> str:
        count = len(self._workers.actors)
        return f"<{self._remote_class.__name__} {self.instance_id!r} on {count} workers of group {self.remote_group!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._remote_class, self._workers.for_workers())


def start_component(
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    remote_group: str,
    instance_id: str | None,
    execute: Execute,
    takes_mesh: bool,
) -> RemoteProxy:
    """Construct ``cls`` on workers of a group and return a proxy to them."""
    settings = current_settings()
    plan = find_group(settings.plans, remote_group)
    from twinkle.infra.ray_workers import start_workers

    bound = signature(cls).bind(*args, **kwargs)  # raises for a wrong argument before any process is started
    mesh = _mesh_for(plan, bound.arguments.get("device_mesh"), settings, execute, takes_mesh)
    if takes_mesh:
        bound.arguments["device_mesh"] = mesh
    name = name_component(cls.__name__, instance_id)
    workers = start_workers(cls, bound.args, bound.kwargs, plan, mesh, name, execute, settings)
    record_component(cls.__name__, name, remote_group, mesh)
    return _proxy_class(cls)(cls, workers)


def _mesh_for(
    plan: GroupPlan, given: DeviceMesh | None, settings: Settings, execute: Execute, takes_mesh: bool
) -> DeviceMesh:
    workers, prefix = len(plan.workers), plan.platform.prefix
    if execute == "first":
        return DeviceMesh.from_sizes(dp_size=1, device_type=prefix)
    mesh = given if given is not None or not takes_mesh else settings.mesh
    if mesh is None:
        return DeviceMesh.from_sizes(dp_size=workers, device_type=prefix)
    if mesh.world_size not in (workers, workers * plan.gpus_per_worker):
        allowed = f"{len(plan.ranks)}, as group {plan.name!r} has"
        raise InvalidInputError("device_mesh", f"{mesh.world_size} ranks", allowed)
    return mesh


def _restored(cls: type, workers: "WorkerGroup") -> RemoteProxy:
    return _proxy_class(cls)(cls, workers)


@cache
def _proxy_class(cls: type) -> type[RemoteProxy]:
    specs = remote_methods(cls)
    methods: dict[str, Any] = {name: _method(cls, name, spec) for name, spec in specs.items()}
    if "__len__" in specs:
        methods["__len__"] = _length(specs["__len__"])
    if "__iter__" in specs:
        methods["__iter__"] = _iteration(specs["__iter__"])
    if "__next__" in specs:
        methods["__next__"] = _next_item(specs["__next__"])
    return type(f"{cls.__name__}Proxy", (RemoteProxy,), {**driver_methods(cls), **methods})


def _method(cls: type, name: str, spec: RemoteSpec) -> Callable[..., Any]:
    original = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))

    @wraps(original)
    def call(self: RemoteProxy, *args: Any, **kwargs: Any) -> Any:
        return self._workers.call(name, spec, args, kwargs)

    return call


def _length(spec: RemoteSpec) -> Callable[[RemoteProxy], int]:
    def length(self: RemoteProxy) -> int:
        return int(
            self._workers.call("__len__", RemoteSpec("all", "first", "first", sync=True, timeout=spec.timeout), (), {})
        )

    return length


def _iteration(spec: RemoteSpec) -> Callable[[RemoteProxy], Iterator[Any]]:
    def iterate(self: RemoteProxy) -> Iterator[Any]:
        return self._workers.iterate(spec)

    return iterate


def _next_item(spec: RemoteSpec) -> Callable[[RemoteProxy], Any]:
    def next_item(self: RemoteProxy) -> Any:
        return self._workers.next_item(None, spec)

    return next_item
