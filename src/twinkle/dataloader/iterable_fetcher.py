"""A fetcher that returns one global batch of a stream for each call, reduced to this process's slice."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from twinkle.dataloader.mesh import WHOLE, DataMesh
from twinkle.errors import DataError, InvalidInputError

__all__ = ["DeviceMeshIterableFetcher"]


class DeviceMeshIterableFetcher:
    """Fetches batches of a stream for torch's loader. ``fetch`` raises StopIteration at the end of the stream.

    A row that is empty or cannot be read (OSError) is skipped, at most ``max_retries`` rows in succession; then
    ``fetch`` raises DataError. A batch shorter than ``min_batch_size`` (by default one row for each process) ends the
    stream. Without ``auto_collation``, each call returns one row. This class is for your own loaders:
    :class:`DataLoader` does not use it, because it makes its batches in its workers.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        auto_collation: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        batch_size: int,
        device_mesh: DataMesh | None,
        min_batch_size: int | None = None,
        max_retries: int = 20,
    ) -> None:
        if batch_size < 1:
            raise InvalidInputError("batch_size", batch_size, "an integer ≥ 1")
        self._rows: Iterator[Any] = iter(dataset)
        self._auto_collation = auto_collation
        self._collate = collate_fn
        self._mesh = WHOLE if device_mesh is None else device_mesh
        self._batch_size = batch_size
        smallest = self._mesh.data_world_size if min_batch_size is None else min_batch_size
        self._smallest = batch_size if drop_last else smallest
        self._max_retries = max_retries

    def fetch(self, possibly_batched_index: object = None) -> Any:
        """Return the next batch. torch passes an index, which a stream ignores."""
        if not self._auto_collation:
            return self._collate(self._next_row())
        batch: list[Any] = []
        while len(batch) < self._batch_size:
            try:
                batch.append(self._next_row())
            except StopIteration:
                break
        if not batch or len(batch) < self._smallest:
            raise StopIteration
        return self._collate(batch[self._mesh.get_slice(len(batch))])

    def _next_row(self) -> Any:
        for _ in range(self._max_retries + 1):
            try:
                row = next(self._rows)
            except OSError:
                continue
            if row is not None and row != {}:
                return row
        raise DataError(f"No valid data after {self._max_retries + 1} rows of the stream")
