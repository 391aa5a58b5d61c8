"""A table whose rows are packs of encoded rows."""

from collections.abc import Iterator
from typing import Any, ClassVar, Unpack

from twinkle.dataset.dataset import Dataset, Row, on_worker
from twinkle.dataset.loading import Rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.options import LoadOptions
from twinkle.dataset.packing import DEFAULT_CAPACITY, join_rows, pack
from twinkle.errors import InvalidInputError
from twinkle.infra import remote_class

__all__ = ["PackingDataset"]

# Rows are packed within windows of neighbours, because the cost grows with the square of the window, and windows can be
# packed in parallel.
_WINDOW = 1000


@remote_class(execute="first")
class PackingDataset(Dataset):
    """A table of packs. Encode first, then call :meth:`pack_dataset`.

    A pack has at most ``max_length`` tokens of the template (2048 if that is None); a longer row is a pack of its own.
    """

    can_stream: ClassVar[tuple[bool, ...]] = (False,)

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        packing_num_proc: int = 1,
        **load_options: Unpack[LoadOptions],
    ) -> None:
        if packing_num_proc < 1:
            raise InvalidInputError("packing_num_proc", packing_num_proc, "an integer ≥ 1")
        self.packing_num_proc = packing_num_proc
        self.packed_idx: list[list[int]] | None = None
        self.packed_length: list[int] | None = None
        self._packed_rows: Rows | None = None
        super().__init__(dataset_meta, **load_options)

    @on_worker
    def pack_dataset(self) -> None:
        """Decide which rows go together. They are joined when a pack is read."""
        template = self._require_template("pack_dataset")
        rows = self._sources.require_current()
        if "length" not in rows.column_names:
            raise InvalidInputError("dataset", rows.column_names, "encoded rows (Tokenize dataset first)")
        from datasets import Dataset as TableOfWindows

        lengths = [int(length) for length in rows["length"]]
        starts = list(range(0, len(lengths), _WINDOW))
        windows = TableOfWindows.from_dict(
            {"start": starts, "lengths": [lengths[start : start + _WINDOW] for start in starts]}
        )
        packs = windows.map(
            _PackWindow(template.max_length or DEFAULT_CAPACITY),
            batched=True,
            batch_size=1,
            num_proc=min(self.packing_num_proc, len(starts)) if self.packing_num_proc > 1 and starts else None,
            remove_columns=["start", "lengths"],
            keep_in_memory=True,
            load_from_cache_file=False,
            desc="Pack",
        )
        self.packed_idx = list(packs["rows"]) if starts else []
        self.packed_length = list(packs["packed_length"]) if starts else []
        self._packed_rows = rows

    def __getitem__(self, index: int) -> Row:
        columns = self._sources.require_current()[self._packs()[index]]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return self._serve(join_rows(rows))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self._packs())

    def _packs(self) -> list[list[int]]:
        if self.packed_idx is None or self._packed_rows is not self.dataset:  # not packed, or changed since
            raise InvalidInputError("dataset", "not packed", "packed rows (Call `pack_dataset()` first)")
        return self.packed_idx


class _PackWindow:
    """Packs a window of rows, given their lengths and the number of the first row.

    Returns the row numbers and the length of each pack.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def __call__(self, windows: Any) -> dict[str, list[Any]]:
        ((start,), (lengths,)) = windows["start"], windows["lengths"]
        bins = pack(lengths, self._capacity)
        return {
            "rows": [[start + place for place in places] for places in bins],
            "packed_length": [sum(lengths[place] for place in places) for places in bins],
        }
