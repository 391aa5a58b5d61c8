"""Global batches (the rows of all processes), and the slice of each that belongs to this process."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from twinkle.dataloader.draw import EpochOrder, RowDraw, SamplerOrder, begin_epoch
from twinkle.dataloader.mesh import WHOLE, DataMesh

__all__ = ["BatchPlan", "DeviceMeshSampler", "GivenBatches", "cut"]

T = TypeVar("T")


def cut(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` items. The last one may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class DeviceMeshSampler:
    """The batches of a batch sampler, each reduced to this process's slice.

    A batch shorter than ``min_batch_size`` (by default one row for each process) ends the iteration. If
    ``skip_samples`` ends in the middle of a batch, the rest of that batch is served.
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
    """The batches of every epoch of a table, and the loader's position in them.

    The position is the number of rows consumed over all epochs. A checkpoint needs nothing else: the epoch and the row
    within it follow from it. The order and the sizes of batches are the same for all processes; each process gets its
    slice of every batch.
    """

    def __init__(
        self,
        order: EpochOrder | SamplerOrder,
        rows: int,
        batch_size: int,
        mesh: DataMesh,
        min_batch_size: int,
        drop_last: bool,
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
        """Return the number of batches left in the epoch of :attr:`position`."""
        return len(list(self.sizes()))

    def __iter__(self) -> Iterator[list[RowDraw]]:
        """Yield this process's draws, batch by batch, from :attr:`position` to the end of its epoch."""
        if not self.rows_per_epoch:
            return
        epoch, start = divmod(self.position, self.rows_per_epoch)
        draws = self._order.draws(epoch, start)
        for size in self.sizes():
            batch = list(islice(draws, size))
            yield batch[self._mesh.get_slice(size)]

    def sizes(self) -> Iterator[int]:
        """Yield the size of each batch left in the epoch, counting the rows of all processes.

        If the position is in the middle of a batch, the rest of that batch comes first, so that all later batches are
        the same as without an interruption.
        """
        if not self.rows_per_epoch:
            return
        start = self.position % self.rows_per_epoch
        while start < self.rows_per_epoch:
            end = min(self.rows_per_epoch, start - start % self._batch_size + self._batch_size)
            yield end - start
            start = end


class GivenBatches:
    """The batches of a batch sampler of the user's, as a plan like :class:`BatchPlan`.

    The sampler is read once for each epoch. A batch with fewer than ``min_batch_size`` rows ends the epoch. Positions
    of a checkpoint are right only if every epoch has the same number of rows.
    """

    def __init__(self, sampler: Iterable[Sequence[int]], seed: int, mesh: DataMesh, min_batch_size: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._mesh = mesh
        self._min_batch_size = min_batch_size
        self._read: list[list[int]] | None = None  # the batches of an epoch that has not begun, and its number
        self._read_epoch = 0
        self._begun = 0  # epochs that were read
        self._rows: int | None = None
        self._batches = 0
        self.position = 0

    @property
    def batches_per_epoch(self) -> int:
        return self._batches if self.rows_per_epoch else 0

    @property
    def rows_per_epoch(self) -> int:
        if self._rows is None:  # counted once: some samplers have another order each time they are read
            self._batches = len(self._epoch())
            self._rows = sum(map(len, self._epoch()))
        return self._rows

    def __len__(self) -> int:
        return len(list(self.sizes()))

    def __iter__(self) -> Iterator[list[RowDraw]]:
        """Yield this process's draws, batch by batch, from :attr:`position` to the end of its epoch."""
        batches, (epoch, start) = list(self._rest()), divmod(self.position, max(self.rows_per_epoch, 1))
        self._read = None
        for batch in batches:
            draws = [RowDraw(at, int(row), (self._seed, epoch, at)) for at, row in enumerate(batch, start)]
            start += len(batch)
            yield draws[self._mesh.get_slice(len(draws))]

    def sizes(self) -> Iterator[int]:
        """Yield the size of each batch left in the epoch, counting the rows of all processes."""
        yield from map(len, self._rest())

    def _rest(self) -> Iterator[list[int]]:
        """Yield the batches from :attr:`position` on; the rest of one, if the position is inside it."""
        skip = self.position % max(self.rows_per_epoch, 1)
        for batch in self._epoch():
            if skip < len(batch):
                yield batch[skip:]
            skip = max(0, skip - len(batch))

    def _epoch(self) -> list[list[int]]:
        """Return the batches of the epoch of :attr:`position`."""
        epoch = self.position // self._rows if self._rows else 0
        if self._read is None or self._read_epoch != epoch:
            self._begun = begin_epoch(self._sampler, epoch, self._begun)
            self._read, self._read_epoch = [], epoch
            for batch in self._sampler:
                if len(batch) < self._min_batch_size:
                    break
                self._read.append(list(batch))
        return self._read
