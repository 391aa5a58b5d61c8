"""How a batch is divided among processes, as far as a data loader needs to know it."""

from typing import Protocol

__all__ = ["WHOLE", "DataMesh"]


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
