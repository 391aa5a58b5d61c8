"""Groups of processes that train one model together, and their communication.

A process is a rank. Every rank has its own data, and holds either the whole base model or one shard of it. All ranks
must call the same verbs in the same order, also a rank that has no data: most methods here are collective operations,
which block until every rank of the group has called them. Groups of ranks are :class:`Ranks`; a process that trains by
itself uses :data:`ALONE`, whose operations communicate nothing.

A rank that fails where others wait for it (:func:`in_step`) ends the groups of all ranks, so that none waits for its
timeout.
"""

import atexit
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, RankFailedError, TwinkleError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.process_groups import sequence_groups

T = TypeVar("T")

_BUCKET_NUMBERS = 16 << 20  # numbers that one all-reduce adds up: 64 MiB in fp32
_FAILURE = "twinkle: the rank that failed first, and its error"  # a key of torch's store, which all ranks share


class Ranks(Protocol):
    """A group of processes. Its methods are collective: all processes of the group call them, or none does.

    The properties involve no communication.
    """

    @property
    def size(self) -> int: ...

    @property
    def number(self) -> int:
        """Return the number of this process within the group, from 0."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def add_up(self, tensor: Tensor) -> None:
        """Replace each number of ``tensor`` by its sum over all ranks (all-reduce).

        The tensors must be on the same kind of device on all ranks.
        """
        ...

    def total(self, value: float) -> float:
        """Return the sum of the values of all ranks."""
        ...

    def smallest(self, value: int) -> int:
        """Return the smallest of the values of all ranks."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank number. Values must be picklable."""
        ...

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of rank 0 (broadcast)."""
        ...


class _Alone:
    """The group of a single process: nothing is communicated."""

    size = 1
    number = 0
    group: dist.ProcessGroup | None = None

    def add_up(self, tensor: Tensor) -> None:
        pass

    def total(self, value: float) -> float:
        return value

    def smallest(self, value: int) -> int:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def copy_from_first(self, tensor: Tensor) -> None:
        pass


ALONE: Ranks = _Alone()


class ProcessRanks:
    """The ranks of a torch process group that accepts tensors both in host memory and on the device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self._failure: str | None = None
        self.size = dist.get_world_size(group)
        self.number = dist.get_rank(group)
        _in_use.add(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        if self._failure is not None:
            raise RankFailedError(self._failure)
        return self._group

    def leave(self, failure: str) -> None:
        """Let go of the group, which has ended. From now on its operations raise a RankFailedError."""
        self._group, self._failure = None, failure

    def add_up(self, tensor: Tensor) -> None:
        with in_step(self):
            dist.all_reduce(tensor, group=self.group)

    def total(self, value: float) -> float:
        return float(self._reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.SUM))

    def smallest(self, value: int) -> int:
        return int(self._reduced(torch.tensor(value), dist.ReduceOp.MIN))

    def _reduced(self, number: Tensor, how: Any) -> Tensor:
        """Reduce a number in host memory, so that the device does not have to be synchronized."""
        with in_step(self):
            dist.all_reduce(number, how, group=self.group)
        return number

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with in_step(self):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def copy_from_first(self, tensor: Tensor) -> None:
        with in_step(self):
            dist.broadcast(tensor, group=self.group, group_src=0)


# Whatever refers to process groups: a connection is closed when nothing refers to its group any more.
_in_use: WeakSet[ProcessRanks] = WeakSet()
_forget_groups: list[Callable[[], None]] = []
_failures_with_nccl: list[str] = []  # after one, this process does not leave its groups: that would wait for others


def when_groups_end(forget: Callable[[], None]) -> None:
    """Call ``forget`` when a failure ends all groups. It must drop further references to them."""
    if forget not in _forget_groups:
        _forget_groups.append(forget)


@contextmanager
def in_step(ranks: Ranks) -> Iterator[None]:
    """Run code in which ranks wait for each other, so that a failure of one of them becomes a failure of all.

    A rank that raises anything there has left the others in the middle of something, and nothing can bring them into
    step again. It tells them what happened and closes its connections, at which the others wake up with an error, and
    do the same. All raise a RankFailedError with the number and the error of the rank that failed first. No group of
    this process can be used after that. With NCCL, which closes no connections, others wake up when its timeout ends.
    """
    assert ranks.size == 1 or ranks.group is not None  # raises the failure that has ended the groups, if there was one
    try:
        yield
    except RankFailedError as error:
        traceback.clear_frames(error.__traceback__)  # see _end_groups: now more of them have ended
        raise
    except Exception as error:
        if ranks.size == 1:
            raise
        raise RankFailedError(_end_groups(error)) from error


def _end_groups(error: Exception) -> str:
    """Tell the other ranks about an error, and leave all groups. Return which rank failed first, and its error."""
    failure = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
    try:
        store = dist.distributed_c10d._get_default_store()
        failure = store.compare_set(_FAILURE, "", failure).decode()
    except RuntimeError:
        pass  # the process that holds the store has ended
    for ranks in list(_in_use):
        ranks.leave(failure)
    if "nccl" in str(dist.get_backend_config()):
        _failures_with_nccl.append(failure)
    else:
        for forget in _forget_groups:
            forget()
        traceback.clear_frames(error.__traceback__)  # variables of functions that have ended refer to groups, too
        dist.destroy_process_group()
    return failure


@dataclass(frozen=True)
class Parallelism:
    """How training is distributed. Each rank belongs to one replica of the model, and holds one shard or all of it.

    Ranks of a sequence group have the same rows, and each computes a slice of them (:mod:`twinkle.model.transformers`
    only). Ranks that hold the cuts of one model (:mod:`twinkle.model.megatron` only) have the same rows, too, and
    compute them together. Elsewhere every rank has its own rows, and is such a group by itself.
    """

    ranks: Ranks = ALONE  # all ranks
    data: Ranks = ALONE  # one rank of each group with the same rows: a sum over these counts every row once
    sequence: Ranks = ALONE  # the ranks of this sequence group
    replicas: Ranks = ALONE  # the ranks that hold the same shard as this one
    shards: Ranks = ALONE  # the ranks that hold the shards of this replica
    shard_mesh: TorchMesh | None = None  # `shards` as a torch mesh, for FSDP2; None: every rank has the whole model
    model: Ranks = ALONE  # the ranks that hold the cuts of this model (tensor × pipeline parallel)

    @property
    def sharded(self) -> bool:
        return self.shard_mesh is not None


SINGLE = Parallelism()


def read_mesh(device_mesh: DeviceMesh | None, device: torch.device, *, cuts_sequences: bool = False) -> Parallelism:
    """Return how ``device_mesh`` distributes training on ``device``; :data:`SINGLE` for None and for one process.

    With several processes this joins the process group, so all ranks must call it. ``cuts_sequences``: allow a
    ``ulysses_size`` above 1.
    """
    if device_mesh is None or device_mesh.world_size == 1:
        return SINGLE
    check_mesh(device_mesh, cuts_sequences=cuts_sequences)
    join_processes(device, device_mesh.world_size)
    whole = dist.group.WORLD
    assert whole is not None
    ranks, torch_mesh = ProcessRanks(whole), device_mesh.to_torch_device_mesh()
    if torch_mesh.device_type != device.type:
        raise InvalidInputError("device_mesh.device_type", torch_mesh.device_type, f"{device.type}, as the model")
    data: Ranks = ranks
    sequence: Ranks = ALONE
    if (device_mesh.ulysses_size or 1) > 1:
        sequence, data = (ProcessRanks(group) for group in sequence_groups(device_mesh))
    if device_mesh.fsdp_world_size <= 1:
        return Parallelism(ranks, data, sequence, replicas=ranks)
    replicas: Ranks = ALONE
    if device_mesh.dp_world_size > 1:
        replicas = ProcessRanks(torch_mesh.get_group("dp"))
    shards = ProcessRanks(torch_mesh.get_group("fsdp"))
    return Parallelism(ranks, data, sequence, replicas, shards, torch_mesh["fsdp"])


def own_device(device: str | torch.device | None, device_mesh: DeviceMesh | None) -> torch.device:
    """Return the device of this process: ``device``, or by default CUDA where there is one, else the CPU.

    With a mesh of several processes, "cuda" without a number means the GPU with the process's local rank.
    """
    chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if str(chosen) == "cuda" and device_mesh is not None and device_mesh.world_size > 1:
        chosen = torch.device("cuda", read_environment().local_rank)
        torch.cuda.set_device(chosen)
    return chosen


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run ``action``, as all ranks do; return this rank's result. A TwinkleError on one rank is raised on all ranks.

    No rank continues alone: it would wait forever in its next collective operation.
    """
    result, error = None, None
    try:
        result = action()
    except TwinkleError as raised:
        error = raised
    if ranks.size > 1:
        first = next((each for each in ranks.gather(error) if each is not None), None)
        error = error or first
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def first_does(ranks: Ranks, action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the other ranks wait. A TwinkleError that it raises is raised on all ranks."""
    together(ranks, action if ranks.number == 0 else lambda: None)


@torch.no_grad()
def copy_from_first(ranks: Ranks, tensors: Iterable[Tensor]) -> None:
    """Copy tensors from rank 0 to all ranks, so that randomly drawn values are the same everywhere."""
    if ranks.size > 1:
        for tensor in tensors:
            ranks.copy_from_first(tensor)


def add_up_all(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Sum each of many tensors over all ranks, like :meth:`Ranks.add_up`, but in few messages.

    Tensors may have any dtype; the sums are computed in fp32.
    """
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        if index + 1 == len(tensors) or sum(each.numel() for each in bucket) >= _BUCKET_NUMBERS:
            flat = torch.cat([each.reshape(-1).float() for each in bucket])
            ranks.add_up(flat)
            for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                each.copy_(part.view_as(each))
            bucket = []


def check_mesh(mesh: DeviceMesh, *, cuts_sequences: bool = False) -> None:
    """Raise for mesh dimensions that models of Transformers do not support; they support dp and fsdp.

    ``ep_size`` adds no processes. With fsdp, each process holds a part of all experts anyway.

    ``cuts_sequences``: allow a ``ulysses_size`` above 1, too.
    """
    sizes = {
        "tp_size": mesh.tp_world_size,
        "pp_size": mesh.pp_world_size,
        "cp_size": mesh.cp_world_size,
        "ep_size": max(mesh.ep_world_size, 1 if mesh.fsdp_world_size > 1 else mesh.ep_size or 1),
        "ulysses_size": 1 if cuts_sequences else mesh.ulysses_size or 1,
    }
    asked = {name: size for name, size in sizes.items() if size > 1}
    if asked:
        text = ", ".join(f"{name}={size}" for name, size in asked.items())
        raise UnsupportedError(
            f"device_mesh: {text}: models of Transformers are spread by dp_size and fsdp_size, and TransformersModel "
            "also by ulysses_size; ep_size needs fsdp_size above 1, which divides experts, too; MegatronModel "
            "and MultiLoraMegatronModel have tp_size, pp_size and ep_size"
        )
    if max(1, mesh.dp_world_size) * max(1, mesh.fsdp_world_size) != mesh.world_size:
        raise InvalidInputError("device_mesh.mesh_dim_names", mesh.mesh_dim_names, "dp and fsdp, over all processes")


def join_processes(device: torch.device, size: int) -> None:
    """Join the process group, unless the program has done so already.

    torch finds the other processes by the environment variables that torchrun sets.
    """
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=read_environment().dist_timeout_seconds))
        # Leave before the interpreter exits: threads of the group that still run then may abort the process.
        atexit.register(_leave)
    if dist.get_world_size() != size:
        raise InvalidInputError("device_mesh", f"{size} processes", f"{dist.get_world_size()}, as many as run")
    if device.type == "cuda" and "cpu:gloo" not in str(dist.get_backend_config()):
        raise InvalidInputError(
            "backend of the process group", dist.get_backend(), "'cpu:gloo,cuda:nccl': ranks exchange host tensors too"
        )


def _leave() -> None:
    if dist.is_initialized() and not _failures_with_nccl:
        dist.destroy_process_group()
