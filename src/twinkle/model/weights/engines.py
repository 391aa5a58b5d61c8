"""Transports of buckets from GPU to GPU, between processes that have devices of their own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from twinkle.errors import TwinkleError, UnsupportedError
from twinkle.model.weights.buckets import Bucket, TensorMeta, pack, packed_bytes, unpack

__all__ = ["CheckpointEngine", "HCCLCheckpointEngine", "NCCLCheckpointEngine", "Topology"]

# A broadcast that a process does not join fails after this time. It includes the time in which a sharded model gathers
# a bucket.
_TIMEOUT = timedelta(minutes=3)
_OUTSIDE = -1
_unannotated: Any = dist  # torch's annotations lack TCPStore, and the constructor of ProcessGroupNCCL with a timeout


@dataclass(frozen=True)
class Topology:
    """The rank of each worker in the group that broadcasts weights; −1: it is not part of the group."""

    model: tuple[int, ...]
    sampler: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return 1 + len(self.sampler)


class CheckpointEngine(ABC):
    """Sends buckets from one process of a model to all processes of a sampler, without passing through the driver.

    Rank 0 is the sender. All processes call :meth:`init_process_group` once, and then, for each bucket, the sender
    :meth:`send_weights` and every receiver :meth:`receive_weights` with the same pieces.
    """

    @staticmethod
    def build_topology(model_workers: int, sampler_workers: int) -> Topology:
        """Let the model's first worker send to all workers of the sampler. The model's other workers only gather."""
        others = (_OUTSIDE,) * (model_workers - 1)
        return Topology((0, *others), tuple(range(1, sampler_workers + 1)))

    @abstractmethod
    def prepare(self, host: str) -> Any:
        """Return what the other processes need to find the sender, which ``host`` names. Called in the sender only."""

    @abstractmethod
    def init_process_group(self, rank: int, world_size: int, master_metadata: Any) -> None:
        """Join the group of the sender and its receivers."""

    @abstractmethod
    def send_weights(self, bucket: Bucket) -> None:
        """Send a bucket to all receivers."""

    @abstractmethod
    def receive_weights(self, pieces: Sequence[TensorMeta]) -> Bucket:
        """Return the bucket that the sender sends."""

    @abstractmethod
    def finalize(self) -> None:
        """Leave the group."""


class NCCLCheckpointEngine(CheckpointEngine):
    """Sends a bucket by one NCCL broadcast.

    The group serves nothing else: that of torch.distributed, which a sharded model uses, has other processes in it.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._group: dist.ProcessGroup | None = None

    def prepare(self, host: str) -> tuple[str, int]:
        store = _unannotated.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self._store = store
        return host, store.port

    def init_process_group(self, rank: int, world_size: int, master_metadata: tuple[str, int]) -> None:
        if rank == _OUTSIDE:
            return
        if rank > 0:
            host, port = master_metadata
            self._store = _unannotated.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
        if self._store is None:
            raise TwinkleError("the sender of weights is not prepared: call prepare first")
        self._group = self._make_group(PrefixStore("weights", self._store), rank, world_size)

    def send_weights(self, bucket: Bucket) -> None:
        if self._group is not None:
            self._broadcast(pack(bucket).to(self._device()))

    def receive_weights(self, pieces: Sequence[TensorMeta]) -> Bucket:
        packed = torch.empty(packed_bytes(pieces), dtype=torch.uint8, device=self._device())
        self._broadcast(packed)
        return unpack(pieces, packed)

    def finalize(self) -> None:
        self._group = self._store = None

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _make_group(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group: dist.ProcessGroup = _unannotated.ProcessGroupNCCL(store, rank, world_size, _TIMEOUT)
        return group

    def _broadcast(self, packed: torch.Tensor) -> None:
        if self._group is None:
            raise TwinkleError("the process group of the checkpoint engine is missing: call init_process_group first")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([packed], options).wait()


class HCCLCheckpointEngine:
    """HCCL, the library of Ascend NPUs, as a transport. There is no backend for NPUs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError("HCCLCheckpointEngine: there is no backend for NPUs; CheckpointEngineManager uses GPUs")
