"""How a batch is divided among processes, as far as a data loader needs to know it."""

import sys
from typing import Protocol

from twinkle.dataset import IterableDataset, IterablePackingDataset

__all__ = ["WHOLE", "DataMesh", "is_stream"]


class DataMesh(Protocol):
    """``data_world_size`` processes each get a part of every batch; this one is ``data_rank``."""

    @property
    def data_world_size(self) -> int: ...

    @property
    def data_rank(self) -> int: ...

    def get_slice(self, total_length: int) -> slice:
        """This process's part of ``total_length`` items: contiguous, the first ranks get one more if need be."""
        ...


class _Whole:
    """One process that gets everything."""

    data_world_size = 1
    data_rank = 0

    def get_slice(self, total_length: int) -> slice:
        return slice(0, total_length)


WHOLE: DataMesh = _Whole()


def is_stream(dataset: object) -> bool:
    """Ours, those of the ``datasets`` library, and torch's; everything else has rows by number."""
    if isinstance(dataset, IterableDataset | IterablePackingDataset):
        return True
    # Such an object cannot exist unless its library is loaded: asking must not load it.
    libraries = [sys.modules.get(name) for name in ("datasets", "torch.utils.data")]
    return any(isinstance(dataset, library.IterableDataset) for library in libraries if library is not None)
