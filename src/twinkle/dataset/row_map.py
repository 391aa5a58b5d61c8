"""A preprocessor applied to one row, as lazy datasets do it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from twinkle.errors import DataError, InvalidInputError

__all__ = ["RowMap", "RowPreprocessor"]

Row = dict[str, Any]


@runtime_checkable
class RowPreprocessor(Protocol):
    """A preprocessor that can look at one row. None, or nothing in it: the row is dropped."""

    def preprocess(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True)
class RowMap:
    """``function`` gets columns of one row, or the row itself if it has ``preprocess``; ``fn_kwargs`` go along.

    Columns that it does not return stay, unless they are among ``removed``.
    """

    function: Any  # callable with columns, or a RowPreprocessor: classes of users', which are often both
    removed: frozenset[str] = frozenset()
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, row: Row) -> Row:
        """Of a row that is dropped nothing is left: an empty dict."""
        by_row = isinstance(self.function, RowPreprocessor)
        new = self._one_row(self.function.preprocess, row) if by_row else self._columns(row)
        kept = {name: value for name, value in row.items() if name not in self.removed}
        return {**kept, **new} if new else {}

    def _one_row(self, preprocess: Callable[..., Any], row: Row) -> Mapping[str, Any]:
        made = preprocess(dict(row), **self.fn_kwargs)
        if made is not None and not isinstance(made, Mapping):
            raise InvalidInputError("preprocess_func", f"a {type(made).__name__} from preprocess", "a dict, or None")
        return {} if made is None else made

    def _columns(self, row: Row) -> Mapping[str, Any]:
        columns = self.function({name: [value] for name, value in row.items()}, **self.fn_kwargs)
        if not isinstance(columns, Mapping):
            raise InvalidInputError("preprocess_func", f"a {type(columns).__name__} from it", "a dict of columns")
        counts = {len(values) for values in columns.values()}
        if counts - {0, 1} or len(counts) > 1:
            raise DataError(f"a lazy row must stay one row: {self.function!r} made {max(counts)} of it; use Dataset")
        return {} if counts == {0} else {name: values[0] for name, values in columns.items()}
