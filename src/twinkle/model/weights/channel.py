"""The methods by which the workers of a model and of a sampler exchange weights from GPU to GPU."""

from collections.abc import Sequence
from typing import Any

import torch

from twinkle.infra import remote_function
from twinkle.model.weights.buckets import Bucket, TensorMeta
from twinkle.model.weights.engines import CheckpointEngine, NCCLCheckpointEngine
from twinkle.utils.network import find_node_ip

__all__ = ["WeightChannel"]


class WeightChannel:
    """A base of models and samplers, which :class:`~twinkle.checkpoint_engine.CheckpointEngineManager` calls.

    A model has ``send_weights``, a sampler ``receive_bucket``; both have ``weights_device``.
    """

    weights_device: torch.device
    send_weights: Any
    receive_bucket: Any
    _checkpoint_engine: CheckpointEngine | None = None

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def gpu_id(self) -> str:
        """Return the id of the GPU that holds the weights; "" if they are not on a GPU."""
        if self.weights_device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self.weights_device).uuid)

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def prepare_checkpoint_engine(self) -> Any:
        """Return where the sender of weights, the first worker of a model, can be found."""
        return self._engine().prepare(find_node_ip() or "127.0.0.1")

    @remote_function(dispatch="slice", collect="none", lazy_collect=True)
    def init_checkpoint_process_group(self, rank: list[int], world_size: int, master_metadata: Any) -> None:
        """Join the group that broadcasts weights. ``rank``: one for each worker."""
        self._engine().init_process_group(rank[0], world_size, master_metadata)

    @remote_function(dispatch="all", collect="none", lazy_collect=True)
    def broadcast_weights(self, adapter_name: str, merged: bool, pieces: Sequence[TensorMeta]) -> None:
        """Send pieces of the model's weights to all workers of the sampler. All workers of the model gather them."""
        bucket: Bucket = self.send_weights(adapter_name, merged, pieces)
        self._engine().send_weights(bucket)

    @remote_function(dispatch="all", collect="none", lazy_collect=True)
    def receive_broadcast(self, pieces: Sequence[TensorMeta]) -> None:
        """Receive the pieces that a model sends at the same time."""
        self.receive_bucket(self._engine().receive_weights(pieces))

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def finalize_checkpoint_engine(self) -> None:
        """Leave the group. The next synchronisation makes another one."""
        if self._checkpoint_engine is not None:
            self._checkpoint_engine.finalize()
            self._checkpoint_engine = None

    def _engine(self) -> CheckpointEngine:
        if self._checkpoint_engine is None:
            self._checkpoint_engine = self._make_checkpoint_engine()
        return self._checkpoint_engine

    def _make_checkpoint_engine(self) -> CheckpointEngine:
        return NCCLCheckpointEngine()
