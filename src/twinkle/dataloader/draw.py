"""Which rows an epoch draws, in which order, and what replaces a row that cannot be used.

Everything depends on the seed, the epoch and the position only. So a run that is resumed in the middle of an epoch
draws what an undisturbed one would have drawn, without knowing what happened before.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from twinkle.errors import DataError, InvalidInputError

__all__ = ["Draw", "EpochOrder", "RetrySampler", "Table", "fetch"]


class Table(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int) -> Any: ...


@dataclass(frozen=True)
class Draw:
    """The ``position``-th row of an epoch is the dataset's row ``index``, or a substitute drawn with ``seed``."""

    position: int
    index: int
    seed: tuple[int, ...]


class EpochOrder:
    """The order of an epoch: the dataset's own, or one shuffled with the seed and the epoch's number."""

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self._length = length
        self._shuffle = shuffle
        self._seed = seed

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        """The draws of an epoch from position ``start`` on."""
        order: Sequence[int] | np.ndarray = range(self._length)
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._length)
        for position in range(start, self._length):
            yield Draw(position, int(order[position]), (self._seed, epoch, position))


def fetch(table: Table, draw: Draw, max_retries: int) -> Any:
    """The row of a draw.

    A source that fails to read (OSError) is asked again; a row of which nothing is left (None, an empty dict) is
    replaced by another, chosen at random but always the same for this draw.
    """
    row = _read(table, draw.index, max_retries)
    if not _is_empty(row):
        return row
    for index in np.random.default_rng(draw.seed).integers(len(table), size=max_retries).tolist():
        row = _read(table, index, max_retries)
        if not _is_empty(row):
            return row
    raise DataError(
        f"Max retries exceeded: row {draw.index} and {max_retries} rows in its place are empty; is there any row that "
        "the preprocessor and the template leave something of?"
    )


def _is_empty(row: Any) -> bool:
    return row is None or (isinstance(row, Sized) and len(row) == 0)


def _read(table: Table, index: int, max_retries: int) -> Any:
    for attempt in range(max_retries + 1):
        try:
            return table[index]
        except OSError as error:  # files and networks fail for a moment; anything else would fail again
            if attempt == max_retries:
                raise DataError(f"Max retries exceeded: row {index} cannot be read: {error}") from error
    raise AssertionError("the last attempt returns or raises")


class RetrySampler:
    """Row numbers of which each can be read, exactly ``len(dataset) - skip_samples`` of them.

    A number whose row is empty is replaced as :func:`fetch` does it; when ``original_sampler`` ends early, numbers in
    an order shuffled with ``seed`` follow. For samplers of one's own: :class:`DataLoader` replaces rows where they are
    read, in its workers, and reads each only once.
    """

    def __init__(
        self,
        original_sampler: Iterable[int],
        dataset: Table,
        max_retries: int = 20,
        skip_samples: int = 0,
        seed: int = 42,
    ) -> None:
        if not 0 <= skip_samples <= len(dataset):
            raise InvalidInputError("skip_samples", skip_samples, f"0 to {len(dataset)}, the rows there are")
        self._original = original_sampler
        self._dataset = dataset
        self._max_retries = max_retries
        self._skip = skip_samples
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        numbers = _Numbers(self._dataset)
        for position, index in enumerate(self._indices()):
            if position == len(self._dataset):
                return
            if position >= self._skip:
                yield int(fetch(numbers, Draw(position, index, (self._seed, 0, position)), self._max_retries))

    def __len__(self) -> int:
        return len(self._dataset)

    def _indices(self) -> Iterator[int]:
        yield from self._original
        while len(self._dataset):
            yield from np.random.default_rng(self._seed).permutation(len(self._dataset)).tolist()


class _Numbers:
    """The numbers of a table's rows, None for those that are empty."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, idx: int) -> int | None:
        return idx if self._table[idx] else None
