"""torch's loader set up with our batches. It runs the worker processes and keeps their batches in order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from twinkle.dataloader.batches import BatchPlan, GivenBatches, cut
from twinkle.dataloader.draw import RowDraw, Table, fetch
from twinkle.dataloader.mesh import DataMesh

__all__ = ["stream_loader", "table_loader"]

Collate = Callable[[list[Any]], Any]


def table_loader(
    table: Table, collate: Collate, plan: BatchPlan | GivenBatches, max_retries: int, options: dict[str, Any]
) -> "DataLoader[Any]":
    """Return a loader for the batches of a table, as planned by ``plan``."""
    return DataLoader(
        _Drawn(table, max_retries),  # type: ignore[arg-type]  # torch only uses __getitem__
        batch_sampler=plan,
        collate_fn=collate,
        generator=torch.Generator(),
        **options,
    )


def stream_loader(
    rows: Iterable[Any],
    collate: Collate,
    batch_size: int,
    mesh: DataMesh,
    min_batch_size: int,
    drop_last: bool,
    options: dict[str, Any],
) -> "DataLoader[Any]":
    """Return a loader for a stream. It yields pairs: a batch's size over all processes, and this process's slice."""
    smallest = batch_size if drop_last else min_batch_size
    batches = _StreamBatches(rows, collate, batch_size, mesh, smallest)
    return DataLoader(batches, batch_size=None, generator=torch.Generator(), **options)


class _Drawn:
    """A table indexed by draws. Empty rows are replaced here, in the worker that reads them."""

    def __init__(self, table: Table, max_retries: int) -> None:
        self._table = table
        self._max_retries = max_retries

    def __getitem__(self, draw: RowDraw) -> Any:
        return fetch(self._table, draw, self._max_retries)


class _StreamBatches(IterableDataset[tuple[int, Any]]):
    """The global batches of a stream, each reduced to this process's slice. Empty rows are skipped."""

    def __init__(
        self, rows: Iterable[Any], collate: Collate, batch_size: int, mesh: DataMesh, min_batch_size: int
    ) -> None:
        self._rows = rows
        self._collate = collate
        self._batch_size = batch_size
        self._mesh = mesh
        self._min_batch_size = min_batch_size

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for batch in cut((row for row in self._rows if row), self._batch_size):
            if len(batch) < self._min_batch_size:
                return
            yield len(batch), self._collate(batch[self._mesh.get_slice(len(batch))])
