"""Weights from GPU to GPU: the first worker of a model broadcasts buckets to all workers of a sampler."""

from collections.abc import Sequence
from typing import Any, Self

from twinkle.infra.lazy_result import wait_for
from twinkle.model.weights.buckets import TensorMeta
from twinkle.model.weights.engines import NCCLCheckpointEngine, Topology
from twinkle.model.weights.offer import WeightsOffer

__all__ = ["Broadcasts"]


class Broadcasts:
    """Broadcasts from the worker group of a model to that of a sampler. The workers join a group at the first one."""

    def __init__(self, model: Any, sampler: Any, topology: Topology) -> None:
        self._model = model
        self._sampler = sampler
        self._topology = topology
        self._joined = False

    @classmethod
    def between(cls, model: Any, sampler: Any) -> Self | None:
        """Return broadcasts between the workers of two proxies; None unless each worker has a GPU of its own."""
        model_gpus, sampler_gpus = _listed(model.gpu_id()), _listed(sampler.gpu_id())
        gpus = [*model_gpus, *sampler_gpus]
        if not all(gpus) or len(set(gpus)) < len(gpus):
            return None
        return cls(model, sampler, NCCLCheckpointEngine.build_topology(len(model_gpus), len(sampler_gpus)))

    def send(self, offer: WeightsOffer, buckets: Sequence[Sequence[TensorMeta]]) -> None:
        """Send buckets of the offered weights one after another. After an error, the next call makes a new group."""
        if not self._joined:
            self._join()
        self._joined = False  # a broadcast that fails leaves the group unusable
        for pieces in buckets:
            sent = self._model.broadcast_weights(offer.adapter_name, offer.merged, pieces)
            wait_for([sent, self._sampler.receive_broadcast(pieces)])
        self._joined = True

    def _join(self) -> None:
        place, size = self._model.prepare_checkpoint_engine(), self._topology.world_size
        ranks = ((self._model, self._topology.model), (self._sampler, self._topology.sampler))
        wait_for([each.init_checkpoint_process_group(list(own), size, place) for each, own in ranks])


def _listed(ids: str | list[str]) -> list[str]:
    """Return the results of all workers; that of a single one is not in a list."""
    return ids if isinstance(ids, list) else [ids]
