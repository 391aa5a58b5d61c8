"""Promises of results: a driver can pass the result of one remote call to another without fetching it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from twinkle.infra.collect import Collect, Origin, collect_results
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Arguments

__all__ = ["LazyResult", "Origin", "has_lazy", "resolved", "wait_for"]


class LazyResult:
    """A promise of a call's result: call it to get the result, or pass it to another remote function.

    A promise that is passed on is resolved by the receiving workers; the data does not come to this process. Indexing,
    ``len`` and iteration wait for the result and apply to it. ``when_seen`` is called when the result is first fetched.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        origin: Origin,
        collect: Collect,
        mesh: DeviceMesh,
        timeout: float | None,
        when_seen: Callable[[], object] | None = None,
    ) -> None:
        self._refs = refs
        self._origin = origin
        self._collect = collect
        self._mesh = mesh
        self._timeout = timeout
        self._when_seen = when_seen
        self._result: list[Any] = []  # empty until the result is fetched, then one item

    def __call__(self) -> Any:
        if not self._result:
            if self._when_seen is not None:
                self._when_seen()
            from twinkle.infra.ray_results import gather

            values = gather(self._refs, self._origin, self._timeout)
            origin = self._origin
            self._result.append(collect_results(self._collect, values, self._mesh, origin.workers, origin.of))
        return self._result[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __len__(self) -> int:
        return len(self())

    def __getitem__(self, key: Any) -> Any:
        return self()[key]

    def __repr__(self) -> str:
        state = repr(self._result[0]) if self._result else "not collected yet"
        return f"<result of {self._origin.component!r}.{self._origin.method}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyResult, (self._refs, self._origin, self._collect, self._mesh, self._timeout)


def wait_for(results: Sequence[LazyResult]) -> None:
    """Wait for several promises at the same time, without fetching them. The first failure is raised at once."""
    from twinkle.infra.ray_results import wait_together

    for result in results:
        if result._when_seen is not None:
            result._when_seen()
    wait_together([(result._refs, result._origin) for result in results])


def has_lazy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument, or an item of a list, tuple or dict argument, is a promise; no deeper."""
    return any(isinstance(item, LazyResult) for value in (*args, *kwargs.values()) for item in _items(value))


def resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments with each promise that :func:`has_lazy` finds replaced by its result."""
    return tuple(_resolved(value) for value in args), {name: _resolved(value) for name, value in kwargs.items()}


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _resolved(value: Any) -> Any:
    if not any(isinstance(item, LazyResult) for item in _items(value)):
        return value
    if isinstance(value, LazyResult):
        return value()
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    return type(value)(_resolved(item) for item in value)
