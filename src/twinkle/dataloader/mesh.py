"""The part of a device mesh that a data loader uses: how a batch is divided among processes."""

import sys
from dataclasses import dataclass
from typing import Protocol

from twinkle.dataset import Dataset, IterableDataset, IterablePackingDataset
from twinkle.infra import Platform, current_settings

__all__ = ["WHOLE", "DataMesh", "is_stream", "own_mesh"]


class DataMesh(Protocol):
    """How ``data_world_size`` processes share every batch. This process is number ``data_rank``."""

    @property
    def data_world_size(self) -> int: ...

    @property
    def data_rank(self) -> int: ...

    def get_slice(self, total_length: int) -> slice:
        """Return this process's slice of ``total_length`` items. The first ranks get one more if it does not divide."""
        ...


class _Whole:
    """The mesh of a single process, which gets every batch whole."""

    data_world_size = 1
    data_rank = 0

    def get_slice(self, total_length: int) -> slice:
        return slice(0, total_length)


WHOLE: DataMesh = _Whole()


@dataclass(frozen=True)
class _DriverMesh:
    """The mesh of the driver of a Ray cluster, which gets every batch whole: a model divides it among its workers."""

    data_world_size: int
    data_rank: int = 0

    def get_slice(self, total_length: int) -> slice:
        return slice(0, total_length)


def own_mesh(device_mesh: DataMesh | None) -> DataMesh:
    """Return how this process shares batches with the others of a mesh."""
    if device_mesh is None:
        return WHOLE
    if current_settings().mode == "ray" and Platform.get_rank() < 0:  # workers have ranks, the driver has none
        return _DriverMesh(device_mesh.data_world_size)
    return device_mesh


def is_stream(dataset: object) -> bool:
    """Return whether a dataset is a stream: ours, one of the ``datasets`` library, or one of torch.

    Everything else is a table, whose rows are read by number.
    """
    if isinstance(dataset, Dataset):
        # A proxy of a dataset on a worker group has no attributes: then its class decides.
        by_class = isinstance(dataset, IterableDataset | IterablePackingDataset)
        return bool(getattr(dataset, "streaming", by_class))
    # Such an object exists only if its library is already imported, so do not import it just to check.
    libraries = [sys.modules.get(name) for name in ("datasets", "torch.utils.data")]
    return any(isinstance(dataset, library.IterableDataset) for library in libraries if library is not None)
