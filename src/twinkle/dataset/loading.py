"""Loading of the rows that a :class:`DatasetMeta` describes, as a dataset of the ``datasets`` library."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.extras import require
from twinkle.hub import HubOperation

if TYPE_CHECKING:
    import datasets

__all__ = ["Rows", "load_rows"]

Rows: TypeAlias = "datasets.Dataset | datasets.IterableDataset"

# By file name extension: the builder that reads such a file, and the builder's arguments.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "arrow": ("arrow", {}),
    "csv": ("csv", {"na_filter": False}),  # a cell "NA" is text, not a missing value
    "json": ("json", {}),
    "jsonl": ("json", {}),
    "parquet": ("parquet", {}),
    "pq": ("parquet", {}),
    "tsv": ("csv", {"na_filter": False, "sep": "\t"}),
    "txt": ("text", {}),
}


def load_rows(meta: DatasetMeta, streaming: bool, options: dict[str, Any]) -> Rows:
    """Load the rows that ``meta`` describes, as a table or as a stream."""
    require("datasets", "twinkle.dataset")
    path = meta.local_path()
    if meta.data is not None:
        rows = _from_memory(meta, streaming, options)
    elif path is not None:
        if path.is_dir() and meta.split != "train":  # all its files are read, whatever their split
            raise InvalidInputError(
                "split", meta.split, "'train': all files of a directory are one; name the file you want"
            )
        rows = _from_files(path, streaming, options)
    else:
        rows = HubOperation.load_dataset(meta.dataset_id, meta.subset_name, meta.split, streaming, **options)
    return _slice(rows, meta, streaming)


def _from_memory(meta: DatasetMeta, streaming: bool, options: dict[str, Any]) -> Rows:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    data = meta.data
    if isinstance(data, DatasetDict | IterableDatasetDict):
        if meta.split not in data:
            raise UnknownNameError("split", meta.split, map(str, data))
        data = data[meta.split]
    if isinstance(data, list | tuple):
        data = Dataset.from_list(list(data), **_only("data in memory", options, "features"))
    elif isinstance(data, dict):
        data = Dataset.from_dict(data, **_only("data in memory", options, "features"))
    elif not isinstance(data, Dataset | IterableDataset):
        return _from_generator(data, streaming, options)
    if isinstance(data, IterableDataset) and not streaming:
        raise InvalidInputError("data", "a stream", "a table; use IterableDataset for streams")
    return data.to_iterable_dataset() if streaming and isinstance(data, Dataset) else data


def _from_generator(generator: Any, streaming: bool, options: dict[str, Any]) -> Rows:
    from datasets import Dataset, IterableDataset

    if not callable(generator):
        allowed = "a list of rows, a dict of columns, a generator function, or a dataset of the datasets library"
        raise InvalidInputError("data", generator, allowed)
    if streaming:
        return IterableDataset.from_generator(generator, **_only("data in memory", options, "features"))
    taken = _only("data in memory", options, "features", "cache_dir", "keep_in_memory", "num_proc")
    return Dataset.from_generator(generator, **taken)


def _only(source: str, options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return ``options``. Raise UnknownNameError for an option that this source does not support."""
    for name in options:
        if name not in names:
            raise UnknownNameError(f"load option for {source}", name, names)
    return options


def _from_files(path: Path, streaming: bool, options: dict[str, Any]) -> Rows:
    from datasets import load_dataset

    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _extension(file) in _BUILDERS)
    kinds = {_extension(file) for file in files}
    if path.is_file() and not kinds <= _BUILDERS.keys():
        raise UnknownNameError("file extension", _extension(path), _BUILDERS)
    builders: list[tuple[str, dict[str, Any]]] = []
    for kind in sorted(kinds):
        if _BUILDERS[kind] not in builders:
            builders.append(_BUILDERS[kind])
    if len(builders) != 1:
        found = ", ".join(sorted(kinds)) or "none"
        allowed = f"a directory with data files of one kind ({', '.join(sorted(_BUILDERS))}); found: {found}"
        raise InvalidInputError("dataset_id", str(path), allowed)
    builder, arguments = builders[0]
    taken = _only("local files", options, "cache_dir", "download_mode", "features", "keep_in_memory", "num_proc")
    names = [str(file) for file in files]
    return load_dataset(builder, data_files=names, split="train", streaming=streaming, **arguments, **taken)


def _extension(file: Path) -> str:
    return file.suffix.lstrip(".").lower()


def _slice(rows: Rows, meta: DatasetMeta, streaming: bool) -> Rows:
    if meta.data_slice is None:
        return rows
    numbers = meta.data_slice
    assert isinstance(numbers, Sequence)  # DatasetMeta made it one
    if streaming:
        return _slice_of_stream(rows, numbers)
    if not len(rows):
        raise InvalidInputError("data_slice", numbers, "nothing: the dataset has no rows")
    return rows.select([number % len(rows) for number in numbers])


def _slice_of_stream(rows: Rows, numbers: Sequence[int]) -> Rows:
    """Select consecutive rows of a stream. A stream has no known length, so numbers beyond its end select nothing."""
    start = numbers[0] if len(numbers) else 0
    if list(numbers) != list(range(start, start + len(numbers))) or start < 0:
        raise UnsupportedError(f"data_slice: a stream takes consecutive rows such as range(100, 200), got {numbers!r}")
    return rows.skip(start).take(len(numbers))
