"""A dataset whose rows are mapped and encoded when they are read: for images, or rows too large to store encoded."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from twinkle.dataset.dataset import Dataset, Row
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.options import FilterOptions, LoadOptions, MapOptions, check_filter_options, check_map_options
from twinkle.dataset.saving import write_rows
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra import remote_class

if TYPE_CHECKING:
    from twinkle.preprocessor import Preprocessor
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from twinkle.errors import DataError

__all__ = ["LazyDataset", "RowMap", "RowPreprocessor"]


@remote_class(execute="first")
class LazyDataset(Dataset):
    """A dataset that records maps, mixing, checks and encoding, and applies them to one row when it is read.

    A filter is applied immediately, to the raw rows. If a preprocessor or the template leaves nothing of a row, the row
    is an empty dict. ``map``, ``encode`` and ``check`` accept the options of :class:`Dataset` except ``features``;
    there, options about processing a table (processes, batches, files) have no effect.
    """

    can_stream: ClassVar[tuple[bool, ...]] = (False,)

    def __init__(self, dataset_meta: DatasetMeta | None = None, **load_options: Unpack[LoadOptions]) -> None:
        self._maps: dict[str, list[RowMap]] = {}
        self._maps_of_mixture: list[RowMap] = []
        self._interleaved: bool | None = None
        self.do_encode = False
        self.do_check = False
        self.add_generation_prompt = False
        self.encode_kwargs: dict[str, Any] = {}  # the options that encode() was given
        self._unencoded: frozenset[str] = frozenset()  # columns that encode() removes
        super().__init__(dataset_meta, **load_options)

    @property
    def mixed(self) -> bool:
        return self._interleaved is not None

    def add_dataset(self, dataset_meta: DatasetMeta, **load_options: Unpack[LoadOptions]) -> None:
        if self.mixed:
            raise InvalidInputError("dataset_meta", dataset_meta.get_id(), "datasets added before mix_dataset()")
        super().add_dataset(dataset_meta, **load_options)
        self._maps[dataset_meta.get_id()] = []

    def mix_dataset(self, interleave: bool = True) -> None:
        if len(self.datasets) > 1:
            self._interleaved = interleave

    def map(
        self,
        preprocess_func: "Preprocessor | type[Preprocessor] | str | Callable[..., Any]",
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **map_options: Unpack[MapOptions],
    ) -> None:
        """Record a function for the rows of ``dataset_meta``; without one, of all datasets or of the mixture.

        A preprocessor with a method ``preprocess(row)`` gets the row; any other gets columns that hold one row.
        """
        options = _checked(map_options)
        function = RowMap(
            self._preprocessor(preprocess_func, init_args),
            frozenset(options.get("remove_columns", [])),
            options.get("fn_kwargs") or {},
        )
        if self.mixed:
            if dataset_meta is not None:
                raise InvalidInputError("dataset_meta", dataset_meta.get_id(), "None: the datasets are mixed already")
            self._maps_of_mixture.append(function)
        elif dataset_meta is None:
            for functions in self._maps.values():
                functions.append(function)
        else:
            self._maps[self._sources.id_of(dataset_meta)].append(function)

    def encode(self, add_generation_prompt: bool = False, **map_options: Unpack[MapOptions]) -> None:
        options = _checked(map_options)
        if map_options.get("fn_kwargs"):
            raise InvalidInputError("fn_kwargs", map_options["fn_kwargs"], "none: the template is the function")
        template = self._require_template("encode")
        if template.truncation_strategy == "split":
            raise UnsupportedError(
                "Lazy tokenize does not support truncation_strategy==`split`: a row must stay one row; use Dataset, or "
                "another truncation_strategy"
            )
        self.do_encode = True
        self.add_generation_prompt = add_generation_prompt
        self.encode_kwargs = dict(map_options)
        self._unencoded = frozenset(options.get("remove_columns", []))

    def check(self, **filter_options: Unpack[FilterOptions]) -> None:
        check_filter_options(filter_options, streaming=False)
        if filter_options.get("fn_kwargs"):
            raise InvalidInputError("fn_kwargs", filter_options["fn_kwargs"], "none: the template is the function")
        self._require_template("check")
        self.do_check = True

    def __getitem__(self, idx: int) -> Row:
        length = len(self)
        if not -length <= idx < length:
            raise IndexError(f"row {idx} of {length}")
        name, place = self._locate(idx % length)
        row: Row = self.datasets[name][place]
        for function in [*self._maps[name], *self._maps_of_mixture]:
            row = row and function(row)
        row = row and self._finish(row)
        return self._serve(row) if row else row

    def __iter__(self) -> Iterator[Row]:
        return (self[idx] for idx in range(len(self)))

    def __len__(self) -> int:
        self._sources.require_current()
        lengths = [len(rows) for rows in self.datasets.values()]
        if self._interleaved is None:
            return lengths[0]
        return min(lengths) * len(lengths) if self._interleaved else sum(lengths)

    def _locate(self, idx: int) -> tuple[str, int]:
        names = list(self.datasets)
        if self._interleaved is None:
            return names[0], idx
        if self._interleaved:
            return names[idx % len(names)], idx // len(names)
        for name in names:
            if idx < len(self.datasets[name]):
                return name, idx
            idx -= len(self.datasets[name])
        raise AssertionError("the index is below the length")

    def _finish(self, row: Row) -> Row:
        if self.do_encode:
            encoded = self._require_template("encode").batch_encode(
                [dict(row)], add_generation_prompt=self.add_generation_prompt
            )
            grown = {**row, **encoded[0]} if encoded else {}
            return {name: value for name, value in grown.items() if name not in self._unencoded}
        if self.do_check and self._require_template("check").check(dict(row)) is None:
            return {}
        return row

    def _write(self, path: Path, kind: str, batch_size: int) -> None:
        write_rows((row for row in self if row), path, kind, batch_size)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of ``map``. Column types are refused, because a single row has none."""
    if options.get("features") is not None:
        raise InvalidInputError("features", options["features"], "none: lazy rows have no column types; use Dataset")
    return check_map_options(options, streaming=False)


@runtime_checkable
class RowPreprocessor(Protocol):
    """A preprocessor of single rows. It returns None or an empty mapping to drop the row."""

    def preprocess(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True)
class RowMap:
    """A recorded ``map``: applies ``function`` to one row, with ``fn_kwargs``.

    The function gets columns that hold one row, or the row itself if it has a method ``preprocess``. Columns that it
    does not return stay, unless they are among ``removed``.
    """

    function: Any  # a callable for columns, or a RowPreprocessor; users' classes are often both
    removed: frozenset[str] = frozenset()
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, row: Row) -> Row:
        """Return the new row, or an empty dict if the row is dropped."""
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
