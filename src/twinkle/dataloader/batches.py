"""Global batches, cut to this process's part."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from twinkle.dataloader.draw import Draw, EpochOrder
from twinkle.dataloader.mesh import WHOLE, DataMesh

__all__ = ["BatchPlan", "DeviceMeshSampler", "cut"]

T = TypeVar("T")


def cut(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class DeviceMeshSampler:
    """Batches of a batch sampler, each cut to this process's part.

    A batch shorter than ``min_batch_size`` (by default one row for each process) ends the iteration. Of a batch that
    ``skip_samples`` covers only in part, the tail is kept.
    """

    def __init__(
        self,
        original_batch_sampler: Iterable[Sequence[T]],
        device_mesh: DataMesh | None = None,
        min_batch_size: int | None = None,
        skip_samples: int = 0,
    ) -> None:
        self._batches: Iterable[Sequence[Any]] = original_batch_sampler
        self._mesh = device_mesh or WHOLE
        self._min_batch_size = min_batch_size or self._mesh.data_world_size
        self._skip = skip_samples

    def __iter__(self) -> Iterator[Sequence[Any]]:
        skip = self._skip
        for batch in self._batches:
            if len(batch) < self._min_batch_size:
                return
            if skip >= len(batch):
                skip -= len(batch)
                continue
            rest = batch[skip:]
            skip = 0
            yield rest[self._mesh.get_slice(len(rest))]


class BatchPlan:
    """The batches of every epoch of a table, and where in them a loader stands.

    A position counts the rows of all epochs so far. It is all that a checkpoint needs: epoch and place follow from it.
    ``order`` and ``sizes`` are the same for all processes; each gets its slice of every batch.
    """

    def __init__(
        self, order: EpochOrder, rows: int, batch_size: int, mesh: DataMesh, min_batch_size: int, drop_last: bool
    ) -> None:
        tail = rows % batch_size
        self._kept_tail = 0 if drop_last or tail < min_batch_size else tail
        self._order = order
        self._batch_size = batch_size
        self._mesh = mesh
        self._full = rows // batch_size
        self.position = 0

    @property
    def batches_per_epoch(self) -> int:
        return self._full + (1 if self._kept_tail else 0)

    @property
    def rows_per_epoch(self) -> int:
        return self._full * self._batch_size + self._kept_tail

    def __len__(self) -> int:
        """What is left of the epoch that :attr:`position` is in."""
        return len(list(self.sizes()))

    def __iter__(self) -> Iterator[list[Draw]]:
        """This process's draws, batch by batch, from :attr:`position` to the end of its epoch."""
        if not self.rows_per_epoch:
            return
        epoch, start = divmod(self.position, self.rows_per_epoch)
        draws = self._order.draws(epoch, start)
        for size in self.sizes():
            batch = list(islice(draws, size))
            yield batch[self._mesh.get_slice(size)]

    def sizes(self) -> Iterator[int]:
        """Rows of all processes in each batch that is left of the epoch.

        Of a batch that the position is in the middle of, the tail comes first, so that the others stay what they are.
        """
        if not self.rows_per_epoch:
            return
        start = self.position % self.rows_per_epoch
        while start < self.rows_per_epoch:
            end = min(self.rows_per_epoch, start - start % self._batch_size + self._batch_size)
            yield end - start
            start = end
