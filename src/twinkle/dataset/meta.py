"""The description of a dataset: where its rows come from, and which of them are used."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from twinkle.errors import InvalidInputError

__all__ = ["DatasetMeta"]


@dataclass(frozen=True)
class DatasetMeta:
    """A dataset of a hub (``hf://…``; ``ms://…`` or just ``…``: ModelScope), a local path, or data in memory.

    ``data`` is a list of rows, a dict of columns, a generator function, or a dataset of the ``datasets`` library.
    ``data_slice`` selects rows by number; a number beyond the end wraps around (of a stream it selects nothing).
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
            raise InvalidInputError("dataset_id", self.dataset_id, "a dataset id or a path, unless data is given")
        if self.dataset_id and self.data is not None:
            raise InvalidInputError("data", type(self.data).__name__, f"nothing beside dataset_id {self.dataset_id!r}")
        if self.data_slice is not None and not isinstance(self.data_slice, Iterable):
            raise InvalidInputError("data_slice", self.data_slice, "row numbers (data_slice must be an iterable)")
        if self.data_slice is not None and not isinstance(self.data_slice, Sequence):
            object.__setattr__(self, "data_slice", tuple(self.data_slice))  # a generator could be read only once
        if not isinstance(self.data_slice, range) and not all(isinstance(n, Integral) for n in self.data_slice or ()):
            raise InvalidInputError("data_slice", self.data_slice, "row numbers, integers")

    def get_id(self) -> str:
        """Return a name for the source of these rows. It does not depend on ``data_slice``."""
        name = self.dataset_id or f"__memory_{self._data_hash}__"
        for separator in ("/", "\\", "."):
            name = name.replace(separator, "_")
        return f"{name}:{self.subset_name}:{self.split}"

    @cached_property
    def _data_hash(self) -> str:
        """Return eight hex digits of a hash of the data, so that a copy sent to another process has the same id."""
        return hashlib.sha256(_fingerprint(self.data).encode()).hexdigest()[:8]

    def local_path(self) -> Path | None:
        """Return the local file or directory that the id names, or None if there is none.

        An id that can only be a path (it begins with ``/``, ``./``, ``../`` or ``~``) must exist; else it raises.
        """
        if not self.dataset_id or "://" in self.dataset_id:
            return None
        path = Path(self.dataset_id).expanduser()
        if not path.exists() and self.dataset_id.startswith(("/", "./", "../", "~")):
            raise InvalidInputError("dataset_id", self.dataset_id, "an existing file or directory, or a hub's id")
        return path if path.exists() else None


def _fingerprint(data: Any) -> str:
    from datasets import Dataset, DatasetDict
    from datasets.fingerprint import Hasher

    if isinstance(data, Dataset):
        return str(data._fingerprint)  # computed by the library; hashing the object would read the whole table
    if isinstance(data, DatasetDict):
        return "".join(_fingerprint(split) for split in data.values())
    if isinstance(data, list | tuple | dict):
        return json.dumps(data, default=repr, sort_keys=True)
    return str(Hasher.hash(data))
