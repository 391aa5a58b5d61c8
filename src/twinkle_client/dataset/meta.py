"""The description of the rows of a dataset."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

from twinkle_client.client.json_body import encode
from twinkle_client.data_format import columns_to_rows
from twinkle_client.dataset.local_file import read_rows
from twinkle_client.errors import InvalidRequestError, invalid
from twinkle_client.protocol.base import TYPE_KEY

__all__ = ["DatasetMeta", "MetaFields", "is_meta", "own_meta"]


@dataclass(frozen=True)
class DatasetMeta:
    """The rows of a dataset: a dataset on a hub (``hf://…``, ``ms://…``), a file, or data in memory.

    A file of this machine is read here and its rows are sent; a path that does not exist here is a path on the server.
    ``data`` is a list of rows, a dict of columns, or a dataset of the ``datasets`` library. ``data_slice`` selects rows
    by number; numbers beyond the end start over.
    """

    dataset_id: str = ""  # a path object is taken too, and becomes text
    subset_name: str = "default"
    split: str = "train"
    data_slice: Iterable[int] | None = None
    data: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.dataset_id, os.PathLike):
            object.__setattr__(self, "dataset_id", str(Path(self.dataset_id).expanduser().absolute()))
        if not self.dataset_id and self.data is None:
            raise invalid("dataset_id", self.dataset_id, "a dataset's id or a path, unless data is given")
        if self.dataset_id and self.data is not None:
            raise invalid("data", type(self.data).__name__, f"nothing beside dataset_id {self.dataset_id!r}")
        if self.data_slice is not None and not isinstance(self.data_slice, range):
            object.__setattr__(self, "data_slice", [int(number) for number in self.data_slice])

    def rows(self) -> list[dict[str, Any]] | None:
        """Return the rows that ``data_slice`` selects of a file of this machine or of ``data``; None if the rows are
        elsewhere."""
        data = self.data
        if data is None:
            path = self._local_path()
            if path is None:
                return None
            data = read_rows(path)
        data = _in_memory(data)
        rows = columns_to_rows(data) if isinstance(data, dict) else [dict(row) for row in data]
        if self.data_slice is None:
            return rows
        return [rows[number % len(rows)] for number in self.data_slice] if rows else []

    def to_wire(self) -> str:
        dataset_id, data = self.dataset_id, self.data
        if data is None and (path := self._local_path()) is not None:
            dataset_id, data = "", read_rows(path)
        return encode(
            {
                "dataset_id": dataset_id,
                "subset_name": self.subset_name,
                "split": self.split,
                "data_slice": _slice(self.data_slice),
                "data": None if data is None else _in_memory(data),
                TYPE_KEY: "DatasetMeta",
            }
        ).decode()

    def _local_path(self) -> Path | None:
        if "://" in self.dataset_id:
            return None
        path = Path(self.dataset_id).expanduser()
        return path if path.exists() else None


@runtime_checkable
class MetaFields(Protocol):
    """The fields of the library's DatasetMeta, which scripts may pass instead of ours."""

    @property
    def dataset_id(self) -> str: ...

    @property
    def subset_name(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def data_slice(self) -> Iterable[int] | None: ...

    @property
    def data(self) -> Any: ...


def is_meta(meta: object) -> TypeGuard[MetaFields]:
    """Return whether a value is a DatasetMeta (an instance, not the class), ours or the library's."""
    return isinstance(meta, MetaFields) and not isinstance(meta, type)


def own_meta(meta: object) -> DatasetMeta:
    if isinstance(meta, DatasetMeta):
        return meta
    if not is_meta(meta):
        raise invalid("dataset_meta", meta, "a DatasetMeta, of twinkle_client.dataset or of twinkle.dataset")
    return DatasetMeta(meta.dataset_id, meta.subset_name, meta.split, meta.data_slice, meta.data)


def _slice(numbers: Iterable[int] | None) -> dict[str, Any] | None:
    if numbers is None:
        return None
    if isinstance(numbers, range):
        return {"_slice_type_": "range", "start": numbers.start, "stop": numbers.stop, "step": numbers.step}
    return {"_slice_type_": "list", "values": list(numbers)}


def _in_memory(data: Any) -> Any:
    if callable(data):
        raise InvalidRequestError("data: a function is code of this program, which is never shipped; give its rows")
    if isinstance(data, Mapping):
        return dict(data)
    if not isinstance(data, Iterable) or isinstance(data, str):
        raise invalid("data", data, "a list of rows, or a dict of columns")
    return list(data)
