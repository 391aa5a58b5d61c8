"""Buckets from GPU to GPU: one broadcast a bucket, in a process group that serves nothing else."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from twinkle.checkpoint_engine.engine import CheckpointEngine
from twinkle.errors import TwinkleError
from twinkle.model.weights.buckets import Bucket, TensorMeta, pack, packed_bytes, unpack

__all__ = ["NCCLCheckpointEngine"]

_TIMEOUT = timedelta(minutes=10)


class NCCLCheckpointEngine(CheckpointEngine):
    """Sends buckets with NCCL. The group is kept apart from torch.distributed's own, which a sharded model uses.

    A broadcast that some process does not join fails after ten minutes.
    """

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None

    def prepare(self, host: str) -> tuple[str, int]:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self._store = store
        return host, store.port

    def init_process_group(self, rank: int, world_size: int, master_metadata: tuple[str, int]) -> None:
        if self._store is None:
            host, port = master_metadata
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
        self._group = self._make_group(dist.PrefixStore("twinkle_weights", self._store), rank, world_size)

    def send_weights(self, bucket: Bucket) -> None:
        self._broadcast(pack(bucket).to(self._device))

    def receive_weights(self, pieces: Sequence[TensorMeta]) -> Bucket:
        packed = torch.empty(packed_bytes(pieces), dtype=torch.uint8, device=self._device)
        self._broadcast(packed)
        return unpack(pieces, packed)

    def finalize(self) -> None:
        self._group = self._store = None

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _make_group(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return dist.ProcessGroupNCCL(store, rank, world_size, _TIMEOUT)

    def _broadcast(self, packed: torch.Tensor) -> None:
        if self._group is None:
            raise TwinkleError("the checkpoint engine has no process group: call init_process_group first")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([packed], options).wait()
