"""The rows of an epoch and their order, and the substitutes for rows that cannot be used.

Everything depends only on the seed, the epoch and the position. A run that is resumed in the middle of an epoch
therefore draws the same rows as a run without an interruption, without knowing what happened before.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from twinkle.errors import DataError, InvalidInputError

__all__ = ["EpochOrder", "RetrySampler", "RowDraw", "SamplerOrder", "Table", "begin_epoch", "fetch"]


class Table(Protocol):
    """A dataset with a length, whose rows are read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int) -> Any: ...


@dataclass(frozen=True)
class RowDraw:
    """The row at ``position`` of an epoch: the dataset's row ``index``, or a substitute drawn with ``seed``."""

    position: int
    index: int
    seed: tuple[int, ...]


class EpochOrder:
    """The order of an epoch: the dataset's own, or one shuffled with the seed and the epoch's number."""

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self._length = length
        self._shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def draws(self, epoch: int, start: int = 0) -> Iterator[RowDraw]:
        """Yield the draws of an epoch from position ``start`` on."""
        order: Sequence[int] | np.ndarray = range(self._length)
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._length)
        for position in range(start, self._length):
            yield RowDraw(position, int(order[position]), (self._seed, epoch, position))


class SamplerOrder:
    """The order of a sampler of the user's. Its length is the number of rows of an epoch.

    :func:`begin_epoch` prepares it for each epoch.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._begun = 0

    def __len__(self) -> int:
        assert isinstance(self._sampler, Sized)
        return len(self._sampler)

    def draws(self, epoch: int, start: int = 0) -> Iterator[RowDraw]:
        """Yield the draws of an epoch from position ``start`` on; raise if the sampler ends before its length."""
        self._begun = begin_epoch(self._sampler, epoch, self._begun, len(self))
        given = 0
        for position, index in enumerate(islice(self._sampler, len(self))):
            given += 1
            if position >= start:
                yield RowDraw(position, int(index), (self._seed, epoch, position))
        if given < len(self):
            raise DataError(f"sampler: it gave {given} row numbers, and its length is {len(self)}")


def begin_epoch(sampler: Iterable[Any], epoch: int, begun: int, length: int | None = None) -> int:
    """Prepare a sampler of the user's for an epoch. Return how many epochs have begun then; ``begun``: until now.

    Samplers of torch for several processes have ``set_epoch``. Others, such as a RandomSampler with a generator, have
    another order each time they are read. So when a run is resumed, the orders of the earlier epochs are read first;
    ``length`` is how much of the sampler an epoch reads.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    elif not isinstance(sampler, list | tuple | range):
        for _ in range(begun, epoch):
            deque(islice(sampler, length), maxlen=0)
    return max(begun, epoch) + 1


def fetch(table: Table, draw: RowDraw, max_retries: int) -> Any:
    """Return the row of a draw.

    A read that fails with OSError is retried ``max_retries`` times. An empty row (None or an empty dict, when
    preprocessing left nothing of it) is replaced by another row, which is chosen at random but is always the same for
    this draw. After ``max_retries`` substitutes that are empty too, DataError is raised.
    """
    row = _read(table, draw.index, max_retries)
    if not _is_empty(row):
        return row
    for index in np.random.default_rng(draw.seed).integers(len(table), size=max_retries).tolist():
        row = _read(table, index, max_retries)
        if not _is_empty(row):
            return row
    raise DataError(
        f"Max retries exceeded: row {draw.index} and {max_retries} substitutes for it are empty; check that the "
        "preprocessor and the template do not leave all rows empty"
    )


def _is_empty(row: Any) -> bool:
    return row is None or (isinstance(row, Sized) and len(row) == 0)


def _read(table: Table, index: int, max_retries: int) -> Any:
    for attempt in range(max_retries + 1):
        try:
            return table[index]
        except OSError as error:  # may be temporary (files, networks); other errors would recur
            if attempt == max_retries:
                raise DataError(f"Max retries exceeded: row {index} cannot be read: {error}") from error
    raise AssertionError("the last attempt returns or raises")


class RetrySampler:
    """Yields exactly ``len(dataset) - skip_samples`` row numbers, each of a row that can be read and is not empty.

    The number of an empty row is replaced as in :func:`fetch`. If ``original_sampler`` ends early, numbers shuffled
    with ``seed`` follow. This class is for your own samplers: :class:`DataLoader` does not use it, because it replaces
    rows in its workers, where they are read, and reads each row only once.
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
            raise InvalidInputError("skip_samples", skip_samples, f"0 to {len(dataset)}, the number of rows")
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
                yield int(fetch(numbers, RowDraw(position, index, (self._seed, 0, position)), self._max_retries))

    def __len__(self) -> int:
        return len(self._dataset)

    def _indices(self) -> Iterator[int]:
        yield from self._original
        while len(self._dataset):
            yield from np.random.default_rng(self._seed).permutation(len(self._dataset)).tolist()


class _Numbers:
    """A table that returns the number of each row, or None for an empty row."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, idx: int) -> int | None:
        return idx if self._table[idx] else None
