"""Writing rows to files: JSON lines, CSV, Parquet."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from twinkle.errors import InvalidInputError, UnsupportedError

__all__ = ["RowFile", "file_format", "write_rows"]

_BY_EXTENSION = {".csv": "csv", ".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_FORMATS = {"csv": "csv", "json": "jsonl", "jsonl": "jsonl", "parquet": "parquet"}


def file_format(path: Path, name: str | None) -> str:
    """Return ``csv``, ``jsonl`` or ``parquet``: by ``name``, else by the path's extension, else JSON lines."""
    if name is None:
        return _BY_EXTENSION.get(path.suffix.lower(), "jsonl")
    if name not in _FORMATS:
        raise InvalidInputError("format", name, f"{', '.join(_FORMATS)} (Unsupported format)")
    return _FORMATS[name]


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path, kind: str, batch_size: int) -> None:
    """Write all rows to one file: a table and Parquet ``batch_size`` rows at a time, everything else row by row."""
    from datasets import Dataset

    if isinstance(rows, Dataset):  # written from columns, without making Python objects
        if kind == "jsonl":
            rows.to_json(path, batch_size=batch_size, lines=True, force_ascii=False)
        elif kind == "csv":
            rows.to_csv(path, batch_size=batch_size, index=False)
        else:
            rows.to_parquet(path, batch_size=batch_size)
    elif kind == "parquet":
        _write_parquet(rows, path, batch_size)
    else:
        _write_text(rows, path, kind)


class RowFile:
    """A text file to which all processes that serve rows of one dataset append, one row at a time."""

    def __init__(self, path: Path, kind: str) -> None:
        if kind == "parquet":
            raise UnsupportedError("format: 'parquet' cannot grow by a row at a time, allowed: jsonl, csv")
        self._path = path
        self._kind = kind
        path.unlink(missing_ok=True)

    def append(self, row: Mapping[str, Any]) -> None:
        from filelock import FileLock

        with FileLock(f"{self._path}.lock"), self._path.open("a", encoding="utf-8", newline="") as file:
            columns = list(row)
            if self._kind == "csv" and file.tell() == 0:
                file.write(_csv_line(columns))
            file.write(_line(row, columns, self._kind))


def _write_text(rows: Iterable[Mapping[str, Any]], path: Path, kind: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        for number, row in enumerate(rows):
            if number == 0:
                columns = list(row)
                if kind == "csv":
                    file.write(_csv_line(columns))
            file.write(_line(row, columns, kind))


def _write_parquet(rows: Iterable[Mapping[str, Any]], path: Path, batch_size: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    batches = _batches(rows, batch_size)
    first = pa.Table.from_pylist([_plain(row) for row in next(batches, [])])
    with parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for batch in batches:
            writer.write_table(pa.Table.from_pylist([_plain(row) for row in batch], schema=first.schema))


def _batches(rows: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    iterator = iter(rows)
    for first in iterator:
        yield list(chain([first], islice(iterator, size - 1)))


def _line(row: Mapping[str, Any], columns: Sequence[str], kind: str) -> str:
    if kind == "jsonl":
        return json.dumps(_plain(row), ensure_ascii=False) + "\n"
    return _csv_line([_cell(_plain(row[name])) for name in columns])


def _csv_line(cells: Sequence[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def _plain(value: Any) -> Any:
    """Convert arrays and numpy numbers to plain lists and numbers."""
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
