"""The library's datasets on the server. Methods change a dataset there; rows are downloaded only when accessed.

A function of the script cannot be sent to the server. ``map`` and ``filter`` apply it to the rows on the client, and
make the dataset on the server anew, with the resulting rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict, Unpack

from twinkle_client.client.session import TwinkleClient
from twinkle_client.dataset.meta import DatasetMeta, MetaFields, own_meta
from twinkle_client.dataset.own_functions import callable_of, filter_rows, map_rows
from twinkle_client.errors import InvalidRequestError, invalid
from twinkle_client.remote import RemoteObject, component, function_argument, is_own_code, next_of
from twinkle_client.template import Template, template_named

__all__ = ["Dataset", "IterableDataset", "IterablePackingDataset", "LazyDataset", "PackingDataset", "Row"]

Row = dict[str, Any]
AnyMeta = DatasetMeta | MetaFields

_ROWS_OF_A_REQUEST = 128  # when the rows of a dataset on the server are downloaded

# Arguments of the `datasets` library that a server accepts; it refuses values that would change how the server works.


class LoadOptions(TypedDict, total=False):
    revision: str
    token: str


class MapOptions(TypedDict, total=False):
    """The options of map. ``batched`` must be True, which is the default."""

    batch_size: int
    batched: bool
    cache_file_name: str  # only with a function of the script
    desc: str
    fn_kwargs: Mapping[str, Any]  # only with a function of the script
    keep_in_memory: bool
    load_from_cache_file: bool
    new_fingerprint: str  # only with a function of the script
    num_proc: int  # 1
    remove_columns: str | list[str]
    writer_batch_size: int


class FilterOptions(TypedDict, total=False):
    """The options of filter. ``batched`` must be False, which is the default."""

    batched: bool
    cache_file_name: str  # only with a function of the script
    desc: str
    fn_kwargs: Mapping[str, Any]  # only with a function of the script
    keep_in_memory: bool
    load_from_cache_file: bool
    new_fingerprint: str  # only with a function of the script
    num_proc: int  # 1
    writer_batch_size: int


@dataclass(frozen=True)
class _Source:
    """One loaded dataset. ``given``: as the script describes it; ``sent``: as the server knows it.

    changed: the server has changed its rows, so that ``sent`` no longer describes them.
    """

    given: DatasetMeta
    sent: DatasetMeta
    options: Mapping[str, Any]
    changed: bool = False


class Dataset(RemoteObject):
    """A table of rows.

    ``map`` runs preprocessors of the library (a name, or an object of :mod:`twinkle_client.preprocessor`) on the
    server, and functions of the script on the client. ``template`` is None until :meth:`set_template`.
    """

    processor_type: ClassVar[str] = "dataset"
    streaming: ClassVar[bool] = False

    def __init__(
        self,
        dataset_meta: AnyMeta | None = None,
        *,
        client: TwinkleClient | None = None,
        **load_options: Unpack[LoadOptions],
    ) -> None:
        self._make(dataset_meta, client, dict(load_options))

    def _make(self, meta: AnyMeta | None, client: TwinkleClient | None, options: Mapping[str, Any]) -> None:
        self.template: Template | None = None
        self.has_loader = False  # set by a DataLoader, which then holds the object on the server
        self._template_call: dict[str, Any] | None = None
        self._mixed = False
        self._sources: list[_Source] = []
        described = {}
        if meta is not None:
            described["dataset_meta"] = own_meta(meta)
            load_options = {name: options[name] for name in LoadOptions.__annotations__ if name in options}
            self._sources = [_Source(own_meta(meta), own_meta(meta), load_options)]
        RemoteObject.__init__(self, client=client, **described, **options)
        _ = self.processor_id  # create it now, so that missing data raises here, as for a local dataset

    def add_dataset(self, dataset_meta: AnyMeta, **load_options: Unpack[LoadOptions]) -> None:
        """Load another dataset. Until :meth:`mix_dataset` is called, rows come from the first one."""
        meta = own_meta(dataset_meta)
        self.call("add_dataset", dataset_meta=meta, **load_options)
        self._sources.append(_Source(meta, meta, load_options))

    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix all loaded datasets into one: interleaved until the shortest is used up, or one after another."""
        self.call("mix_dataset", interleave=interleave)
        self._mixed = True

    def set_template(self, template_func: object, **init_args: Any) -> None:
        """Choose the template that encodes rows: a name, or a template of :mod:`twinkle_client.template`."""
        self._set_template("template_func", template_func, init_args)

    def _set_template(self, argument: str, template: object, init_args: Mapping[str, Any]) -> None:
        name, options = component(argument, template, init_args)
        chosen = template_named(name, options, self.client)
        call = {argument: name, **chosen.options}
        self.call("set_template", **call)
        self.template, self._template_call = chosen, call

    def map(
        self,
        preprocess_func: object,
        dataset_meta: AnyMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **map_options: Unpack[MapOptions],
    ) -> None:
        """Add or change columns with a preprocessor. Other columns stay, unless they are in ``remove_columns``.

        A function or class of the script gets a dict of columns and returns one; it runs in this process.
        """
        if is_own_code(preprocess_func):
            function = callable_of("preprocess_func", preprocess_func, init_args)
            self._change_here("map", dataset_meta, lambda rows: map_rows(rows, function, map_options))
            return
        known = function_argument("preprocess_func", preprocess_func)
        self._change_there("map", dataset_meta, preprocess_func=known, init_args=init_args, **map_options)

    def filter(
        self,
        filter_func: object,
        dataset_meta: AnyMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **filter_options: Unpack[FilterOptions],
    ) -> None:
        """Keep the rows for which a function or class of the script, called with one row, returns something true.

        It runs in this process. The name of a class means a class of the server, of which Twinkle's server has none.
        """
        if is_own_code(filter_func):
            function = callable_of("filter_func", filter_func, init_args)
            self._change_here("filter", dataset_meta, lambda rows: filter_rows(rows, function, filter_options))
            return
        known = function_argument("filter_func", filter_func)
        self._change_there("filter", dataset_meta, filter_func=known, init_args=init_args, **filter_options)

    def encode(self, add_generation_prompt: bool = False, **map_options: Unpack[MapOptions]) -> None:
        """Tokenise every row with the template; rows for which the template returns nothing are dropped."""
        self.call("encode", add_generation_prompt=add_generation_prompt, **map_options)
        self._mark_changed(self._sources)

    def check(self, **filter_options: Unpack[FilterOptions]) -> None:
        """Keep the rows that the template can encode, without encoding the dataset."""
        self.call("check", **filter_options)
        self._mark_changed(self._sources)

    def cast_column(self, column: str, decode: bool = True) -> None:
        self.call("cast_column", column=column, decode=decode)
        self._mark_changed(self._sources)

    def save_as(
        self, output_path: str, format: str | None = None, batch_size: int = 1000, mode: str = "immediate"
    ) -> None:
        """Write the rows to a file on the server, in a directory that the server allows."""
        self.call("save_as", output_path=str(output_path), format=format, batch_size=batch_size, mode=mode)

    def flush_save(self) -> None:
        self.call("flush_save")

    def __getitem__(self, idx: int) -> Row:
        row: Row = self.call("__getitem__", idx=idx)
        return row

    def __len__(self) -> int:
        return int(self.call("__len__"))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    # --- changing rows, there and here --------------------------------------------------------------------------------

    def _change_there(self, method: str, meta: AnyMeta | None, **arguments: Any) -> None:
        source = None if meta is None else self._source(own_meta(meta))
        which = meta if source is None else source.sent
        self.call(method, dataset_meta=None if which is None else own_meta(which), **arguments)
        self._mark_changed(self._sources if source is None else [source])

    def _change_here(self, method: str, meta: AnyMeta | None, change: Callable[[list[Row]], list[Row]]) -> None:
        """Change the rows of one dataset, or of the mixture, and make the object on the server anew with them."""
        if self.has_loader:
            raise InvalidRequestError(
                f"{method}: a DataLoader has begun to use this dataset on the server; apply functions of the script "
                "before the DataLoader is made"
            )
        chosen = self._chosen(method, meta)
        sent = DatasetMeta(data=change(self._rows_of(method, chosen)))
        if chosen is None:  # the mixture
            new = [_Source(sent, sent, {})]
        else:
            new = [
                replace(one, sent=sent, options={}, changed=False) if one is chosen else one for one in self._sources
            ]

        def prepare() -> None:
            for source in new[1:]:
                self.call("add_dataset", dataset_meta=source.sent, **source.options)
            if self._template_call is not None:
                self.call("set_template", **self._template_call)

        others = {name: value for name, value in self.options.items() if name not in LoadOptions.__annotations__}
        self.recreate({**others, "dataset_meta": new[0].sent, **new[0].options}, prepare)
        self._sources, self._mixed = new, False

    def _chosen(self, method: str, meta: AnyMeta | None) -> _Source | None:
        """Return the source to change; None if all are mixed."""
        if self._mixed:
            return None
        if meta is not None:
            source = self._source(own_meta(meta))
            if source is None:
                raise invalid("dataset_meta", meta, "one of the datasets that were added")
            return source
        if len(self._sources) != 1:
            raise invalid("dataset_meta", None, f"one of the {len(self._sources)} datasets that were added")
        return self._sources[0]

    def _rows_of(self, method: str, chosen: _Source | None) -> list[Row]:
        if chosen is not None and not chosen.changed:
            rows = chosen.sent.rows()
            if rows is not None:
                self._require_unchanged(method, chosen)
                return rows
        if self.streaming:
            raise InvalidRequestError(
                f"{method}: a function of the script runs on this machine, and the rows of this stream are elsewhere; "
                "use a file of this machine, a preprocessor of the library, or a Dataset"
            )
        if chosen is not None:
            self._require_unchanged(method, chosen)
            if len(self._sources) > 1:
                raise InvalidRequestError(
                    f"{method}: the rows of this dataset are on the server, which shows only the first of several; "
                    "apply functions of the script before add_dataset, or after mix_dataset"
                )
        return _downloaded(self)

    def _require_unchanged(self, method: str, chosen: _Source) -> None:
        """Raise if another dataset was changed on the server: it could not be made anew from its description."""
        if any(source.changed for source in self._sources if source is not chosen):
            raise InvalidRequestError(
                f"{method}: the server has changed another dataset of this object already; apply functions of the "
                "script first, or after mix_dataset"
            )

    def _source(self, meta: DatasetMeta) -> _Source | None:
        return next((source for source in self._sources if source.given == meta), None)

    def _mark_changed(self, sources: list[_Source]) -> None:
        changed = {id(source) for source in sources}
        self._sources = [replace(one, changed=True) if id(one) in changed else one for one in self._sources]


class LazyDataset(Dataset):
    """A dataset that maps and encodes each row when it is accessed."""


class PackingDataset(Dataset):
    """A dataset of packed rows: call :meth:`encode`, then :meth:`pack_dataset`, which joins rows up to the template's
    ``max_length``."""

    def __init__(
        self,
        dataset_meta: AnyMeta | None = None,
        packing_num_proc: int = 1,
        *,
        client: TwinkleClient | None = None,
        **load_options: Unpack[LoadOptions],
    ) -> None:
        self._make(dataset_meta, client, {"packing_num_proc": packing_num_proc, **load_options})

    def pack_dataset(self) -> None:
        self.call("pack_dataset")

    def __getitem__(self, index: int) -> Row:
        row: Row = self.call("__getitem__", index=index)
        return row


class IterableDataset(Dataset):
    """A stream of rows, mapped, filtered and encoded as they are read. Each iteration starts at the beginning."""

    streaming: ClassVar[bool] = True

    def __iter__(self) -> Iterator[Row]:
        return _stream(self)


class IterablePackingDataset(Dataset):
    """A stream of packed rows, encoded as they are read: set a template, call :meth:`pack_dataset`, iterate."""

    streaming: ClassVar[bool] = True

    def __init__(
        self,
        dataset_meta: AnyMeta | None = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        *,
        client: TwinkleClient | None = None,
        **load_options: Unpack[LoadOptions],
    ) -> None:
        packing: dict[str, Any] = {"packing_interval": packing_interval, "packing_num_proc": packing_num_proc}
        self._make(dataset_meta, client, {**packing, "cyclic": cyclic, **load_options})

    # In the library this class's argument has another name than in the base class.
    def set_template(self, template_cls: object, **init_args: Any) -> None:  # type: ignore[override]
        self._set_template("template_cls", template_cls, init_args)

    def pack_dataset(self) -> None:
        self.call("pack_dataset")

    def __iter__(self) -> Iterator[Row]:
        return _stream(self)


def _stream(dataset: Dataset) -> Iterator[Row]:
    dataset.call("__iter__")
    try:
        while True:
            yield next_of(dataset)
    except StopIteration:
        return


class _Reader(RemoteObject):
    """A dataloader on the server that reads a dataset's rows in their order."""

    processor_type: ClassVar[str] = "dataloader"


def _downloaded(dataset: Dataset) -> list[Row]:
    """Return all rows of a dataset on the server."""
    reader = _Reader(client=dataset.client, dataset=dataset, batch_size=_ROWS_OF_A_REQUEST)
    reader.class_type = "DataLoader"
    rows: list[Row] = []
    reader.call("__iter__")
    try:
        while True:
            rows += next_of(reader)
    except StopIteration:
        return rows
    finally:
        reader.close()
