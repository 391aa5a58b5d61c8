"""Worker groups: the real objects of a component, each in its own Ray actor, and the calls to them.

A call that returns a promise makes two Ray objects: the result, and a small flag. The group keeps a reference to the
flag only, to notice a failure; so it does not keep a large result alive.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

import ray

from twinkle.environment import read_environment, set_variables, twinkle_variables
from twinkle.framework_util import seed_everything
from twinkle.infra.collect import collect_results
from twinkle.infra.device_group import GroupPlan
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Arguments, Dispatch, Share, dispatch_arguments, shares
from twinkle.infra.initialization import Settings, current_settings, restore_settings
from twinkle.infra.lazy_result import LazyResult, Origin, has_lazy, resolved
from twinkle.infra.platform import NPU, Platform, ensure_hccl_socket_env
from twinkle.infra.ray_resources import worker_places
from twinkle.infra.ray_results import gather
from twinkle.infra.remote_spec import Execute, RemoteSpec
from twinkle.utils.network import find_free_port

__all__ = ["WorkerGroup", "start_workers"]


class Worker:
    """The Ray actor of one rank, in a process of its own.

    Each call returns a result and a flag; the flag is True if an iterator was at its end and there is no result.
    """

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        # Set before the import of anything that reads them, above all torch. Ray's runtime_env could set them too, but
        # would start an additional interpreter for every worker.
        set_variables(variables)
        self._name = name
        self._object: Any = None
        self._iterators: dict[str, Iterator[Any]] = {}

    def __repr__(self) -> str:  # Ray prefixes the lines that this process prints with it
        return self._name

    def meeting_place(self) -> tuple[str, int]:
        """Return an address and a free port on this machine, for torch.distributed. The group asks its first worker."""
        address = ray.util.get_node_ip_address()
        return address, find_free_port(address)

    def construct(self, told: tuple[tuple[str, int], Settings, type, tuple[Any, ...], dict[str, Any]]) -> None:
        master, settings, cls, args, kwargs = told
        set_variables({"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])})
        if settings.plans[0].platform is NPU:
            ensure_hccl_socket_env(master[1])
        restore_settings(settings)
        if settings.seed is not None:
            seed_everything(settings.seed, settings.full_determinism)
        args, kwargs = resolved(args, kwargs)
        self._object = cls(*args, **kwargs)

    def call(self, method: str, dispatch: Dispatch, share: Share | None, arguments: Arguments) -> tuple[Any, bool]:
        """Call a method of the object. With ``share`` None the arguments are this worker's own and are not divided."""
        args, kwargs = arguments
        if share is not None:
            args, kwargs = dispatch_arguments(dispatch, share, *resolved(args, kwargs))
        # Looked up on the type, as the interpreter does for __len__ and other special methods.
        return _sendable(getattr(type(self._object), method)(self._object, *args, **kwargs)), False

    def iterate(self, iterator: str) -> None:
        self._iterators[iterator] = iter(self._object)

    def advance(self, iterator: str | None) -> tuple[Any, bool]:
        """Return the next item of an iterator (None: of the object itself), or None with the flag True at its end."""
        try:
            return next(self._object if iterator is None else self._iterators[iterator]), False
        except StopIteration:
            if iterator is not None:
                del self._iterators[iterator]
            return None, True


class WorkerGroup:
    """The driver's handle of a component's workers."""

    def __init__(self, actors: tuple[Any, ...], mesh: DeviceMesh, origin: Origin, lazy_collect: bool | None) -> None:
        self.actors = actors
        self.mesh = mesh
        self.origin = origin
        self._lazy_collect = lazy_collect  # None: the method's setting, else that of initialize()
        self._numbers = count()
        self._unseen: dict[int, tuple[Origin, list[Any]]] = {}  # flags of promises whose results were not fetched yet

    def for_workers(self) -> "WorkerGroup":
        """Return a copy for code in a worker process, where calls return results instead of promises."""
        return WorkerGroup(self.actors, self.mesh, self.origin, lazy_collect=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerGroup, (self.actors, self.mesh, self.origin, self._lazy_collect)

    def call(self, method: str, spec: RemoteSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the object on the workers that ``spec`` chooses."""
        self.raise_unseen()
        workers = self._chosen(spec.execute)
        dispatch: Dispatch = "all" if spec.execute == "first" else spec.dispatch
        origin = replace(self.origin, method=method, workers=workers)
        parts = shares(self.mesh, workers, len(self.actors))
        sent: list[tuple[Dispatch, Share | None, Any]]
        if has_lazy(args, kwargs):  # each worker resolves the promises, then takes its own share
            arguments = ray.put((args, kwargs))
            sent = [(dispatch, part, arguments) for part in parts]
        elif dispatch == "all" and len(workers) > 1:
            arguments = ray.put((args, kwargs))
            sent = [(dispatch, None, arguments) for _ in parts]
        else:
            sent = [("all", None, dispatch_arguments(dispatch, part, args, kwargs)) for part in parts]
        lazy = self._is_lazy(spec)
        refs = [
            self._remote(worker, "call", lazy).remote(method, *one) for worker, one in zip(workers, sent, strict=True)
        ]
        return self._promise(refs, origin, spec) if lazy else self._collected(refs, origin, spec)

    def iterate(self, spec: RemoteSpec) -> Iterator[Any]:
        """Start an iteration on the workers, and return an iterator that fetches one item at a time."""
        name = uuid4().hex  # unique, because other processes may iterate over the same objects
        workers = self._chosen(spec.execute)
        origin = replace(self.origin, method="__iter__", workers=workers)
        gather([self.actors[worker].iterate.remote(name) for worker in workers], origin, spec.timeout)
        return RemoteIterator(self, name, spec)

    def next_item(self, iterator: str | None, spec: RemoteSpec) -> Any:
        """Return the next item, or a promise of it; raise StopIteration at the end.

        Even for a promise the driver waits for the flag that says whether there is an item; the item itself stays on
        the cluster.
        """
        self.raise_unseen()
        workers = self._chosen(spec.execute)
        origin = replace(self.origin, method="__next__", workers=workers)
        lazy = self._is_lazy(spec)
        refs = [self._remote(worker, "advance", lazy).remote(iterator) for worker in workers]
        if not lazy:
            return self._collected(refs, origin, spec)
        if any(gather([flag for _, flag in refs], origin, spec.timeout)):
            raise StopIteration
        return LazyResult([item for item, _ in refs], origin, spec.collect, self.mesh, spec.timeout)

    def raise_unseen(self) -> None:
        """Raise the failure of an earlier call whose promise was not fetched yet; otherwise it might go unnoticed."""
        for number, (origin, flags) in list(self._unseen.items()):
            done = set(ray.wait(flags, num_returns=len(flags), timeout=0)[0])
            finished = [(flag, worker) for flag, worker in zip(flags, origin.workers, strict=True) if flag in done]
            del self._unseen[number]
            gather([flag for flag, _ in finished], replace(origin, workers=tuple(w for _, w in finished)), None)
            if len(finished) < len(flags):
                self._unseen[number] = (origin, flags)

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def _chosen(self, execute: Execute) -> tuple[int, ...]:
        workers = range(len(self.actors))
        if execute == "peer":
            workers = workers[Platform.get_peer_index(len(workers))]
        return tuple(workers[:1] if execute == "first" else workers)

    def _remote(self, worker: int, method: str, lazy: bool) -> Any:
        """Return a method of an actor. A lazy call makes two Ray objects, the result and the flag."""
        return getattr(self.actors[worker], method).options(num_returns=2 if lazy else 1)

    def _collected(self, refs: list[Any], origin: Origin, spec: RemoteSpec) -> Any:
        answers = gather(refs, origin, spec.timeout)
        if any(flag for _, flag in answers):
            raise StopIteration
        values = [value for value, _ in answers]
        return collect_results(spec.collect, values, self.mesh, origin.workers, origin.of)

    def _promise(self, refs: list[Any], origin: Origin, spec: RemoteSpec) -> LazyResult:
        number = next(self._numbers)
        self._unseen[number] = (origin, [flag for _, flag in refs])
        seen = partial(self._unseen.pop, number, None)
        # If only the first result is used, the other workers' flags are waited for instead, to notice their failures.
        first = spec.collect == "first"
        values = [flag if first and place else value for place, (value, flag) in enumerate(refs)]
        return LazyResult(values, origin, spec.collect, self.mesh, spec.timeout, seen)

    def _is_lazy(self, spec: RemoteSpec) -> bool:
        if spec.sync:
            return False
        for choice in (self._lazy_collect, spec.lazy_collect):
            if choice is not None:
                return choice
        return current_settings().lazy_collect


class RemoteIterator:
    """The driver's iterator over an iteration that runs on the workers."""

    def __init__(self, workers: WorkerGroup, name: str, spec: RemoteSpec) -> None:
        self._workers = workers
        self._name = name
        self._spec = spec
        self._ended = False

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return self._workers.next_item(self._name, self._spec)
        except StopIteration:
            self._ended = True
            raise


def start_workers(
    cls: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: GroupPlan,
    mesh: DeviceMesh,
    name: str,
    execute: Execute,
    settings: Settings,
) -> WorkerGroup:
    """Construct ``cls`` in one new process for each worker of the group, or only for the first (``execute`` first)."""
    places = worker_places(plan)[: 1 if execute == "first" else None]
    shared = _shared_variables(settings)
    actors = tuple(
        ray.remote(Worker)
        .options(**place.options)
        .remote(f"{name}:{rank}", {**shared, **_rank_variables(rank, len(places)), **place.variables})
        for rank, place in enumerate(places)
    )
    origin = Origin(name, plan.name, "__init__", tuple(range(len(actors))), len(actors))
    workers = WorkerGroup(actors, mesh, origin, lazy_collect=None)
    with ExitStack() as failed:
        failed.callback(workers.end)
        (master,) = gather([actors[0].meeting_place.remote()], origin, None)
        # The object sees a local program: components that it constructs are made in its own process.
        local = replace(settings, mode="local", plans=(plan,), mesh=mesh)
        told = ray.put((master, local, cls, args, kwargs))
        gather([actor.construct.remote(told) for actor in actors], origin, None)
        failed.pop_all()
    return workers


def _sendable(result: Any) -> Any:
    if "torch" not in sys.modules:  # then the result has no tensors
        return result
    from twinkle.infra.tensor_collect import on_host

    return on_host(result)


def _shared_variables(settings: Settings) -> dict[str, str]:
    """Return the variables that every worker gets: Twinkle's own, and no others of this process's environment."""
    variables = twinkle_variables()
    if settings.seed is not None:
        variables["TWINKLE_SEED"] = str(settings.seed)
    if settings.name is not None:
        variables["TWINKLE_NAME"] = settings.name
    variables["TWINKLE_FULL_DETERMINISM"] = "1" if settings.full_determinism else "0"
    variables["TWINKLE_MODE"] = "local"  # for components that the worker itself constructs
    variables["TWINKLE_SESSION_ID"] = read_environment().session_id
    return variables


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that torchrun would set. Each process sees only its own devices, so its local rank is 0."""
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    # The logger cannot use the local rank to silence all but the first process: it gets a level instead.
    return variables if rank == 0 else {**variables, "LOG_LEVEL": "ERROR"}
