"""Conversion between records (dataclasses) and rows of a table: one mapper class for most records of the state."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from sqlalchemy import Select, Table

from twinkle.model.types import TrainingSpec
from twinkle.server.state.database.database import Cursor, Row
from twinkle.server.types import BlobRef, read_spec, stored_spec

R = TypeVar("R")
_Conversion = Callable[[Any], Any]


class RecordMapper(Generic[R]):
    """Converts records of one dataclass to rows of one table, and rows to records.

    A field is stored in the column of the same name, in a form that depends on the field's type: text, numbers and
    bytes unchanged, a bool as 0 or 1, an enum as its value, a :class:`BlobRef` in the three columns
    ``<field>_segment``, ``<field>_offset`` and ``<field>_length``, everything else as JSON text. The stored form must
    never change by a byte: rows have checksums, and the next version reads what this one wrote.
    """

    def __init__(self, record: type[R], table: Table) -> None:
        self._record: Callable[..., R] = record
        self._table = table
        kinds = {name: _kind(hint) for name, hint in get_type_hints(record).items()}
        self._columns: Row = dict.fromkeys(column.name for column in table.c)
        blobs = [name for name, kind in kinds.items() if kind is BlobRef]
        self._blobs = [(name, f"{name}_segment", f"{name}_offset", f"{name}_length") for name in blobs]
        self._names = [field.name for field in fields(record) if field.name not in blobs]  # type: ignore[arg-type]
        conversions = {name: _conversions(kinds[name]) for name in self._names}
        # Most values are stored unchanged. Only other conversions are listed, because accepting an op runs this code.
        self._stores = [(name, store) for name, (store, _) in conversions.items() if store is not _same]
        self._loads = [(name, load) for name, (_, load) in conversions.items() if load is not _same]

    def row(self, record: R) -> Row:
        """Return the row of a record. Columns for which the record has no field are None (NULL)."""
        row = self._columns | vars(record)
        for name, store in self._stores:
            if row[name] is not None:
                row[name] = store(row[name])
        for name, segment, offset, length in self._blobs:
            ref = row.pop(name)
            if ref is not None:
                row[segment], row[offset], row[length] = ref.segment, ref.offset, ref.length
        return row

    def insert(self, cursor: Cursor, record: R, **others: object) -> None:
        """Insert a record as a new row. ``others``: values of columns for which the record has no field."""
        row = self.row(record)
        row.update(others)
        cursor.insert(self._table, **row)

    def record(self, row: Row) -> R:
        """Return the record of a row. Columns for which the record has no field are ignored."""
        values = {name: row[name] for name in self._names}
        for name, load in self._loads:
            if values[name] is not None:
                values[name] = load(values[name])
        for name, segment, offset, length in self._blobs:
            stored = row[segment] is not None
            values[name] = BlobRef(row[segment], row[offset], row[length]) if stored else None
        return self._record(**values)

    def find(self, cursor: Cursor, **key: object) -> R | None:
        """Return the record with these values in these columns, or None."""
        row = cursor.find(self._table, **key)
        return None if row is None else self.record(row)

    def all(self, cursor: Cursor, statement: Select[Any], **parameters: object) -> tuple[R, ...]:
        """Return all records that a query finds."""
        return tuple(map(self.record, cursor.rows(statement, parameters)))


def _kind(hint: Any) -> Any:
    """Return the type of a field without ``| None``."""
    kinds = [each for each in get_args(hint) if each is not NoneType]
    return kinds[0] if len(kinds) == 1 and NoneType in get_args(hint) else hint


def _conversions(kind: Any) -> tuple[_Conversion, _Conversion]:
    """Return the functions that store and load a value of this type. They are not called for None, stored as NULL."""
    if kind in (str, int, float) or get_origin(kind) is Literal:
        return _same, _same
    if kind is bytes:
        return _same, bytes  # PostgreSQL's driver may return a memoryview
    if kind is bool:
        return int, bool
    if isinstance(kind, type) and issubclass(kind, Enum):
        return attrgetter("value"), kind
    if kind == TrainingSpec:
        return lambda spec: json.dumps(stored_spec(spec)), lambda text: read_spec(json.loads(text))
    return _to_json, lambda text: _from_json(kind, json.loads(text))


def _same(value: Any) -> Any:
    return value


def _to_json(value: Any) -> str:
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.dumps(dict(plain) if isinstance(plain, Mapping) else plain)


def _from_json(kind: Any, value: Any) -> Any:
    """Convert a decoded JSON value to a field's type: a list to a tuple, an object to ``kind`` if it is a dataclass."""
    if isinstance(value, list):
        return tuple(value)
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: _from_json(None, each) for name, each in value.items()})
    return value
