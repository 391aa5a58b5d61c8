"""Transports of buckets between processes that have devices of their own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from twinkle.errors import UnsupportedError
from twinkle.model.weights.buckets import Bucket, TensorMeta

__all__ = ["CheckpointEngine", "HCCLCheckpointEngine", "NCCLCheckpointEngine"]


class CheckpointEngine(ABC):
    """Sends buckets from one process of a model to all processes of a sampler, without passing through the driver.

    Rank 0 is the sender. All processes call :meth:`init_process_group` once, and then, for each bucket, the sender
    :meth:`send_weights` and every receiver :meth:`receive_weights` with the same pieces.
    """

    @abstractmethod
    def prepare(self) -> Any:
        """Return what the other processes need to find the sender. Called in the sender only."""

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


class NCCLCheckpointEngine:
    """NCCL as a transport. Not available yet."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError("NCCLCheckpointEngine: weights do not travel over NCCL yet; see CheckpointEngineManager")


class HCCLCheckpointEngine:
    """HCCL, the library of Ascend NPUs, as a transport. There is no backend for NPUs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError("HCCLCheckpointEngine: there is no backend for NPUs; CheckpointEngineManager uses GPUs")
