"""What the processes that train one model together say to each other, all of it.

A process is a rank. Every rank has data of its own, and the base model either whole or, where there are shards, a part
of it. Ranks call the same verbs in the same order; a rank without data calls them too. Groups of ranks are
:class:`Ranks`; a process by itself is :data:`ALONE`, which says nothing and copies nothing.
"""

import atexit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, TwinkleError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh

T = TypeVar("T")

_BUCKET_NUMBERS = 16 << 20  # numbers that are added up in one message: 64 MiB in fp32


class Ranks(Protocol):
    """A group of processes. Every method but the properties is called by all of them, or by none."""

    @property
    def size(self) -> int: ...

    @property
    def number(self) -> int:
        """Of this process among them."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def add_up(self, tensor: Tensor) -> None:
        """Each number becomes the sum over all ranks; the tensors lie on the same kind of device everywhere."""
        ...

    def total(self, value: float) -> float: ...

    def smallest(self, value: int) -> int: ...

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in their order; values must pickle."""
        ...

    def copy_from_first(self, tensor: Tensor) -> None: ...


class _Alone:
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
    """The ranks of a process group that takes tensors of host and device alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        self.size = dist.get_world_size(group)
        self.number = dist.get_rank(group)

    def add_up(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def total(self, value: float) -> float:
        return float(self._reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.SUM))

    def smallest(self, value: int) -> int:
        return int(self._reduced(torch.tensor(value), dist.ReduceOp.MIN))

    def _reduced(self, number: Tensor, how: Any) -> Tensor:
        """In host memory: the device need not stop for it."""
        dist.all_reduce(number, how, group=self.group)
        return number

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def copy_from_first(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self.group, group_src=0)


@dataclass(frozen=True)
class Parallelism:
    """How training is spread. Each rank belongs to one replica of the model, and holds one shard of it."""

    ranks: Ranks = ALONE  # all of them
    replicas: Ranks = ALONE  # those that hold the same shard
    shards: Ranks = ALONE  # those that hold the shards of one replica
    shard_mesh: TorchMesh | None = None  # the same, as FSDP2 takes it; None: the model is whole on every rank

    @property
    def sharded(self) -> bool:
        return self.shard_mesh is not None


SINGLE = Parallelism()


def read_mesh(device_mesh: DeviceMesh | None, device: torch.device) -> Parallelism:
    """What a mesh means for training on ``device``; :data:`SINGLE` for none, and for one process."""
    if device_mesh is None or device_mesh.world_size == 1:
        return SINGLE
    check_mesh(device_mesh)
    _ensure_processes(device, device_mesh.world_size)
    whole = dist.group.WORLD
    assert whole is not None
    ranks, torch_mesh = ProcessRanks(whole), device_mesh.to_torch_device_mesh()
    if torch_mesh.device_type != device.type:
        raise InvalidInputError("device_mesh.device_type", torch_mesh.device_type, f"{device.type}, as the model")
    if device_mesh.fsdp_world_size <= 1:
        return Parallelism(ranks, replicas=ranks)
    replicas: Ranks = ALONE
    if device_mesh.dp_world_size > 1:
        replicas = ProcessRanks(torch_mesh.get_group("dp"))
    return Parallelism(ranks, replicas, ProcessRanks(torch_mesh.get_group("fsdp")), torch_mesh["fsdp"])


def own_device(device: str | torch.device | None, device_mesh: DeviceMesh | None) -> torch.device:
    """Of this process: what it was told, or CUDA where there is one; with a mesh, the GPU of its number."""
    chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if str(chosen) == "cuda" and device_mesh is not None and device_mesh.world_size > 1:
        chosen = torch.device("cuda", read_environment().local_rank)
        torch.cuda.set_device(chosen)
    return chosen


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """All ranks do it. Where it fails on one it has failed on all: none goes on alone."""
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
    """One rank does it, the others wait until it is done."""
    together(ranks, action if ranks.number == 0 else lambda: None)


@torch.no_grad()
def copy_from_first(ranks: Ranks, tensors: Iterable[Tensor]) -> None:
    """What was drawn at random is the same on all ranks."""
    if ranks.size > 1:
        for tensor in tensors:
            ranks.copy_from_first(tensor)


def add_up_all(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """:meth:`Ranks.add_up` for many tensors of any type, in few messages, in fp32."""
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        if index + 1 == len(tensors) or sum(each.numel() for each in bucket) >= _BUCKET_NUMBERS:
            flat = torch.cat([each.reshape(-1).float() for each in bucket])
            ranks.add_up(flat)
            for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                each.copy_(part.view_as(each))
            bucket = []


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse dimensions that training is not spread along."""
    sizes = {
        "tp_size": mesh.tp_world_size,
        "pp_size": mesh.pp_world_size,
        "cp_size": mesh.cp_world_size,
        "ep_size": max(mesh.ep_world_size, mesh.ep_size or 1),
        "ulysses_size": mesh.ulysses_size or 1,
    }
    asked = {name: size for name, size in sizes.items() if size > 1}
    if asked:
        text = ", ".join(f"{name}={size}" for name, size in asked.items())
        raise UnsupportedError(
            f"device_mesh: {text}: training is spread by dp_size and fsdp_size; tensor, pipeline, context, expert and "
            "sequence parallelism are not supported"
        )
    if max(1, mesh.dp_world_size) * max(1, mesh.fsdp_world_size) != mesh.world_size:
        raise InvalidInputError("device_mesh.mesh_dim_names", mesh.mesh_dim_names, "dp and fsdp, for all its processes")


def _ensure_processes(device: torch.device, size: int) -> None:
    """Join the others, unless the program has done so already; torchrun's variables say where they are."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=read_environment().dist_timeout_seconds))
        atexit.register(_leave)  # before the interpreter ends under the group's threads, which may abort the process
    if dist.get_world_size() != size:
        raise InvalidInputError("device_mesh", f"{size} processes", f"{dist.get_world_size()}, as many as there are")
    if device.type == "cuda" and "cpu:gloo" not in str(dist.get_backend_config()):
        raise InvalidInputError(
            "backend of the process group", dist.get_backend(), "'cpu:gloo,cuda:nccl': ranks also talk from the host"
        )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
