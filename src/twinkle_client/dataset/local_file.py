"""Read the rows of a file on this machine. The server cannot read the file, so its rows are sent in the request.

Columns of CSV files get the types that the ``datasets`` library would give them: numbers if all cells are numbers.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle_client.errors import InvalidRequestError, unknown

__all__ = ["MAX_FILE_BYTES", "read_rows"]

Rows = list[dict[str, Any]]

# The limit for the rows of one request; larger data belongs on a hub or on the server's disk.
MAX_FILE_BYTES = 32 * 2**20


def read_rows(path: Path) -> Rows | dict[str, Any]:
    """Return the rows of a file, or its columns if a JSON file holds columns."""
    if path.is_dir():
        raise InvalidRequestError(f"dataset_id: {str(path)!r} is a directory of this machine; name one file of it")
    kind = path.suffix.lstrip(".").lower()
    if kind not in _READERS:
        raise unknown("file format", path.suffix, _READERS)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InvalidRequestError(
            f"dataset_id: {str(path)!r} has {size} bytes, and a file of this machine may have {MAX_FILE_BYTES}: its "
            "rows travel in the request. Put it on a hub (hf://…, ms://…) or on the server"
        )
    try:
        return _READERS[kind](path.read_text(encoding="utf-8-sig"))
    except (ValueError, csv.Error) as error:
        raise InvalidRequestError(f"dataset_id: {str(path)!r} cannot be read as {kind}: {error}") from error


def _json_lines(text: str) -> Rows:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _json(text: str) -> Rows | dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:  # many .json files hold one object per line
        return _json_lines(text)
    if not isinstance(content, list | dict):
        raise ValueError("allowed: a list of rows, or an object of columns")
    return content


def _text(text: str) -> Rows:
    return [{"text": line} for line in text.splitlines()]


def _csv(text: str, delimiter: str = ",") -> Rows:
    rows: Rows = list(csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter))
    for name in rows[0] if rows else ():
        convert = _column_type([row[name] for row in rows])
        for row in rows:
            row[name] = convert(row[name])
    return rows


def _column_type(cells: list[Any]) -> Callable[[str], Any]:
    for convert in (int, float):
        try:
            for cell in cells:
                convert(cell)
        except (TypeError, ValueError):
            continue
        return convert
    return str


_READERS: dict[str, Callable[[str], Rows | dict[str, Any]]] = {
    "csv": _csv,
    "json": _json,
    "jsonl": _json_lines,
    "tsv": lambda text: _csv(text, "\t"),
    "txt": _text,
}
