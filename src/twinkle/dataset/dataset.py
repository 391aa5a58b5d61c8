"""A dataset in an Arrow table: load, map, filter, mix, encode, save. The ``datasets`` library does the work."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from twinkle.dataset.loading import Rows, load_rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.options import (
    FilterOptions,
    LoadOptions,
    MapOptions,
    check_filter_options,
    check_load_options,
    check_map_options,
)
from twinkle.dataset.saving import RowFile, file_format, write_rows
from twinkle.dataset.sources import Sources
from twinkle.errors import InvalidInputError, StreamError, UnsupportedError
from twinkle.hub.construction import construct, construct_instance
from twinkle.infra import process_lock, remote_class, remote_function
from twinkle.utils.logger import note_once

if TYPE_CHECKING:
    from twinkle.preprocessor import DataFilter, Preprocessor
    from twinkle.template import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["ROW_NUMBER", "Columns", "Dataset", "EncodeColumns", "Row", "column_length"]

Row = dict[str, Any]

# A dataset lives on one worker of its group. Calls wait for it, so that errors are raised in the call.
on_worker = remote_function(dispatch="all", lazy_collect=False)


@remote_class(execute="first")
class Dataset:
    """A table of rows. The methods that load, change or save it work in place and return nothing.

    With ``streaming=True`` for its first dataset it is a stream, like :class:`IterableDataset`. ``streaming`` says
    which of the two it is.
    """

    can_stream: ClassVar[tuple[bool, ...]] = (False, True)  # the values that ``streaming`` may have; the first: default

    def __init__(self, dataset_meta: DatasetMeta | None = None, **load_options: Unpack[LoadOptions]) -> None:
        self.streaming = self.can_stream[0]
        self.template: Template | None = None
        self._sources = Sources()
        self._row_file: RowFile | None = None
        if dataset_meta is not None:
            self.add_dataset(dataset_meta, **load_options)
        elif load_options:
            raise InvalidInputError("load options", dict(load_options), "none without a dataset_meta")

    @property
    def datasets(self) -> dict[str, Rows]:
        """Return the loaded datasets by :meth:`DatasetMeta.get_id`."""
        return self._sources.by_id

    @property
    def dataset(self) -> "Rows | None":
        """Return the mixture or, before mixing, the first loaded dataset; None if nothing was loaded."""
        return self._sources.current

    @property
    def mixed(self) -> bool:
        return self._sources.mixture is not None

    @on_worker
    def add_dataset(self, dataset_meta: DatasetMeta, **load_options: Unpack[LoadOptions]) -> None:
        """Load another dataset. Until :meth:`mix_dataset` is called, only the first one is served."""
        if not isinstance(dataset_meta, DatasetMeta):
            raise InvalidInputError("dataset_meta", dataset_meta, "a DatasetMeta")
        options = check_load_options(load_options, dataset_meta.split)
        self._choose_streaming(options.pop("streaming", None))
        self._sources.add(dataset_meta, load_rows(dataset_meta, self.streaming, options))

    @on_worker
    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix all loaded datasets into one: interleaved until the shortest is used up, or one after another."""
        self._sources.mix(interleave)

    @on_worker
    def set_template(self, template_func: "Template | type[Template] | str", **init_args: Any) -> None:
        """Set the template for encoding: an instance, a class, a name in ``twinkle.template`` or a plugin id."""
        from twinkle.template import Template

        self.template = construct_instance(template_func, Template, "twinkle.template", init_args)

    @on_worker
    def map(
        self,
        preprocess_func: "Preprocessor | type[Preprocessor] | str | Callable[..., Any]",
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **map_options: Unpack[MapOptions],
    ) -> None:
        """Apply a function that takes a dict of columns and returns a dict of new or changed columns.

        It is applied to the mixture or, before mixing, to the dataset that ``dataset_meta`` describes; if only one is
        loaded, ``dataset_meta`` may be None. A class or a name in ``twinkle.preprocessor`` is called with
        ``init_args``; with an instance or a function they have no effect.

        Columns that it does not return stay, unless they are in ``remove_columns``.
        """
        function, table = self._preprocessor(preprocess_func, init_args), not self.streaming
        options = {**self._progress("Map"), **check_map_options(map_options, streaming=self.streaming)}
        self._sources.change(dataset_meta, lambda rows: rows.map(_PlainColumns(function, table=table), **options))

    @on_worker
    def filter(
        self,
        filter_func: "DataFilter | type[DataFilter] | str | Callable[..., Any]",
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **filter_options: Unpack[FilterOptions],
    ) -> None:
        """Keep the rows for which a function of one row is true.

        ``dataset_meta`` and ``init_args`` are used as by :meth:`map`.
        """
        function = self._filter(filter_func, init_args)
        options = {**self._progress("Filter"), **check_filter_options(filter_options, streaming=self.streaming)}
        self._sources.change(dataset_meta, lambda rows: rows.filter(function, **options))

    @on_worker
    def encode(self, add_generation_prompt: bool = False, **map_options: Unpack[MapOptions]) -> None:
        """Tokenise every row with the template. Rows that the template leaves empty are dropped.

        With ``load_from_cache_file=True``, one process of a machine does the work and the others read its result.
        """
        template = self._require_template("encode")
        if "fn_kwargs" in map_options:
            raise InvalidInputError("fn_kwargs", map_options["fn_kwargs"], "none: the template is the function")
        options = {**self._progress("Encode"), **check_map_options(map_options, streaming=self.streaming)}
        removed = options.get("remove_columns", [])
        function = EncodeColumns(template, add_generation_prompt, removed, table=not self.streaming)
        with process_lock("dataset") if options.get("load_from_cache_file") else nullcontext():
            self._sources.change(None, lambda rows: rows.map(function, **options))

    @on_worker
    def check(self, **filter_options: Unpack[FilterOptions]) -> None:
        """Keep the rows that the template can encode, without encoding the dataset."""
        template = self._require_template("check")
        options = {**self._progress("Check"), **check_filter_options(filter_options, streaming=self.streaming)}
        self._sources.change(None, lambda rows: rows.filter(_Checked(template), **options))

    @on_worker
    def cast_column(self, column: str, decode: bool = True) -> None:
        """Read a column as images, in all loaded datasets. ``decode=False`` keeps them as bytes and paths."""
        from datasets import Image

        self._sources.change_all(lambda rows: rows.cast_column(column, Image(decode=decode)))

    @on_worker
    def save_as(
        self, output_path: str | Path, format: str | None = None, batch_size: int = 1000, mode: str = "immediate"
    ) -> None:
        """Write the rows as JSON lines, CSV or Parquet, depending on ``format`` or on the file's extension.

        ``mode="training"`` writes each row when it is served, until :meth:`flush_save` (JSON lines and CSV only).
        """
        if mode not in ("immediate", "training"):
            raise InvalidInputError("mode", mode, "'immediate' or 'training'")
        if self.dataset is None:
            raise InvalidInputError("dataset", None, "at least one dataset (No dataset to save)")
        if len(self.datasets) > 1 and not self.mixed:
            raise InvalidInputError("dataset", list(self.datasets), "one dataset (Call mix_dataset() before saving)")
        path, kind = Path(output_path).expanduser(), file_format(Path(output_path), format)
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == "training":
            self._row_file = RowFile(path, kind)
        else:
            self._write(path, kind, batch_size)

    @on_worker
    def flush_save(self) -> None:
        """Stop writing served rows, which ``save_as(mode="training")`` started."""
        self._row_file = None

    @on_worker
    def __getitem__(self, idx: int) -> Row:
        if self.streaming:
            raise StreamError(f"{type(self).__name__}: a stream has no rows by number; iterate over it")
        return self._serve(self._sources.require_current()[idx])

    @on_worker
    def __iter__(self) -> Iterator[Row]:
        return map(self._serve, self._sources.require_current())

    @on_worker
    def __len__(self) -> int:
        if self.streaming:
            raise StreamError(f"{type(self).__name__}: a stream has no length; iterate over it")
        return len(self._sources.require_current())

    def _choose_streaming(self, streaming: bool | None) -> None:
        """Apply ``streaming`` of ``add_dataset``; None does not change it. All datasets of one object have the same."""
        if streaming is None:
            return
        if streaming not in self.can_stream:
            allowed = f"{self.can_stream[0]} for a {type(self).__name__}"
            raise InvalidInputError("streaming", streaming, allowed)
        if self.datasets and streaming is not self.streaming:
            raise InvalidInputError("streaming", streaming, f"{self.streaming}, as for the datasets added before")
        self.streaming = streaming

    def _serve(self, row: Row) -> Row:
        if self._row_file is not None:
            self._row_file.append(row)
        return row

    def _write(self, path: Path, kind: str, batch_size: int) -> None:
        write_rows(self._sources.require_current(), path, kind, batch_size)

    def _progress(self, title: str) -> dict[str, Any]:
        """Return the option that titles the progress bar. A stream has none."""
        return {} if self.streaming else {"desc": title}

    def _require_template(self, purpose: str) -> "Template":
        if self.template is None:
            raise InvalidInputError("template", None, f"a template before {purpose}(): call set_template() first")
        return self.template

    @staticmethod
    def _preprocessor(what: Any, init_args: Mapping[str, Any] | None) -> Callable[..., Any]:
        from twinkle.preprocessor import Preprocessor

        init_args = _used_init_args(what, init_args)
        return cast("Callable[..., Any]", construct(what, Preprocessor, "twinkle.preprocessor", init_args))

    @staticmethod
    def _filter(what: Any, init_args: Mapping[str, Any] | None) -> Callable[..., Any]:
        from twinkle.preprocessor import DataFilter

        init_args = _used_init_args(what, init_args)
        return cast("Callable[..., Any]", construct(what, DataFilter, "twinkle.preprocessor", init_args))


def _used_init_args(what: object, init_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the arguments with which ``what`` is constructed: none if it is an instance or a function already."""
    if isinstance(what, str | type) or not init_args:
        return init_args or {}
    name = getattr(what, "__name__", type(what).__name__)
    note_once(f"init_args: no effect on {name}, which is an instance or a function, not a class")
    return {}


class _PlainColumns:
    """Wraps a function so that it gets a plain dict instead of the lazy batch of the ``datasets`` library.

    ``table``: the result is stored, so its messages must not have images.
    """

    def __init__(self, function: Callable[..., Any], *, table: bool) -> None:
        self._function = function
        self._table = table

    def __call__(self, batch: Mapping[str, list[Any]], **fn_kwargs: Any) -> Mapping[str, Any]:
        made = self._function({name: batch[name] for name in batch}, **fn_kwargs)
        if not isinstance(made, Mapping):  # the library would take None for "no change"
            raise InvalidInputError("preprocess_func", f"a {type(made).__name__} from it", "a dict of columns")
        for messages in made.get("messages", []) if self._table else []:
            if any(block.get("type") == "image" for message in messages or [] for block in _blocks(message)):
                raise UnsupportedError(
                    "messages: blocks with images cannot be stored in a table; use a LazyDataset, or put images into "
                    "the column 'images', and <image> into the texts"
                )
        return made


def _blocks(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return list(content) if isinstance(content, list) else []


class _Checked:
    """A filter that keeps the rows that the template can encode."""

    def __init__(self, template: "Template") -> None:
        self._template = template

    def __call__(self, row: Mapping[str, Any]) -> bool:
        return self._template.check(dict(row)) is not None


Columns = dict[str, list[Any]]

# A column that passes through the template. It tells which rows are left, because a template may drop or split rows.
ROW_NUMBER = "_row_number"


class EncodeColumns:
    """Encodes the rows of a batch and drops rows without tokens. Columns that the template does not return are kept.

    ``table``: the result is stored. Its messages are texts then, which have the template's placeholder for an image.
    """

    def __init__(
        self, template: "Template", add_generation_prompt: bool, removed: list[str], *, table: bool = False
    ) -> None:
        self._template = template
        self._table = table
        self._add_generation_prompt = add_generation_prompt
        self._removed = frozenset(removed)

    def __call__(self, batch: Mapping[str, list[Any]]) -> Columns:
        columns = {name: batch[name] for name in batch}
        count = column_length(columns)
        numbered = {**columns, ROW_NUMBER: list(range(count))}
        encoded = self._template.batch_encode(numbered, add_generation_prompt=self._add_generation_prompt)
        numbers = encoded.pop(ROW_NUMBER, [])
        kept = [place for place, _ in enumerate(numbers) if _has_tokens(encoded, place)]
        if len(kept) != len(numbers):
            encoded = {name: [values[place] for place in kept] for name, values in encoded.items()}
        if self._table and "messages" in encoded:
            encoded["messages"] = [list(map(self._text_message, messages)) for messages in encoded["messages"]]
        for name in columns.keys() - encoded.keys():
            encoded[name] = [columns[name][numbers[place]] for place in kept]
        return {name: values for name, values in encoded.items() if name not in self._removed}

    def _text_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        blocks = _blocks(message)
        if not blocks:
            return message
        image = self._template.image_placeholder
        return {**message, "content": "".join(image if each["type"] == "image" else each["text"] for each in blocks)}


def column_length(columns: Mapping[str, list[Any]]) -> int:
    return len(next(iter(columns.values()), []))


def _has_tokens(encoded: Columns, place: int) -> bool:
    """Return whether a row has tokens. A row of nested trajectories (positive, negative) has no ``input_ids``: True."""
    return "input_ids" not in encoded or len(encoded["input_ids"][place]) > 0
