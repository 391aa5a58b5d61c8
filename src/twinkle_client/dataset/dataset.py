"""The library's datasets on the server. Methods change a dataset there; rows are downloaded only when accessed."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypedDict, Unpack

from twinkle_client.client.session import TwinkleClient
from twinkle_client.dataset.meta import DatasetMeta, MetaFields, own_meta
from twinkle_client.remote import RemoteObject, component, function_argument, next_of

__all__ = ["Dataset", "IterableDataset", "IterablePackingDataset", "LazyDataset", "PackingDataset", "Row"]

Row = dict[str, Any]
AnyMeta = DatasetMeta | MetaFields

# Arguments of the `datasets` library that a server accepts; it refuses values that would change how the server works.


class LoadOptions(TypedDict, total=False):
    revision: str
    token: str


class MapOptions(TypedDict, total=False):
    """The options of map. ``batched`` must be True, which is the default."""

    batch_size: int
    batched: bool
    desc: str
    keep_in_memory: bool
    load_from_cache_file: bool
    num_proc: int  # 1
    remove_columns: str | list[str]
    writer_batch_size: int


class FilterOptions(TypedDict, total=False):
    """The options of filter. ``batched`` must be False, which is the default."""

    batched: bool
    desc: str
    keep_in_memory: bool
    load_from_cache_file: bool
    num_proc: int  # 1
    writer_batch_size: int


class Dataset(RemoteObject):
    """A table of rows. ``map`` takes a class's name or an object of :mod:`twinkle_client.preprocessor`, no code."""

    processor_type: ClassVar[str] = "dataset"

    def __init__(
        self,
        dataset_meta: AnyMeta | None = None,
        *,
        client: TwinkleClient | None = None,
        **load_options: Unpack[LoadOptions],
    ) -> None:
        self._make(dataset_meta, client, dict(load_options))

    def _make(self, meta: AnyMeta | None, client: TwinkleClient | None, options: Mapping[str, Any]) -> None:
        described = {} if meta is None else {"dataset_meta": own_meta(meta)}
        RemoteObject.__init__(self, client=client, **described, **options)
        _ = self.processor_id  # create it now, so that missing data raises here, as for a local dataset

    def add_dataset(self, dataset_meta: AnyMeta, **load_options: Unpack[LoadOptions]) -> None:
        """Load another dataset. Until :meth:`mix_dataset` is called, rows come from the first one."""
        self.call("add_dataset", dataset_meta=own_meta(dataset_meta), **load_options)

    def mix_dataset(self, interleave: bool = True) -> None:
        """Mix all loaded datasets into one: interleaved until the shortest is used up, or one after another."""
        self.call("mix_dataset", interleave=interleave)

    def set_template(self, template_func: object, **init_args: Any) -> None:
        """Choose the template that encodes rows: a name, or a template of :mod:`twinkle_client.template`."""
        name, options = component("template_func", template_func, init_args)
        self.call("set_template", template_func=name, **options)

    def map(
        self,
        preprocess_func: object,
        dataset_meta: AnyMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **map_options: Unpack[MapOptions],
    ) -> None:
        """Add or change columns with a preprocessor. Other columns stay, unless they are in ``remove_columns``."""
        function = function_argument("preprocess_func", preprocess_func)
        which: dict[str, Any] = {"dataset_meta": _which(dataset_meta), "init_args": init_args}
        self.call("map", preprocess_func=function, **which, **map_options)

    def filter(
        self,
        filter_func: object,
        dataset_meta: AnyMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        **filter_options: Unpack[FilterOptions],
    ) -> None:
        """Keep the rows for which a filter class of the server returns True; Twinkle's server has none and refuses."""
        function = function_argument("filter_func", filter_func)
        which: dict[str, Any] = {"dataset_meta": _which(dataset_meta), "init_args": init_args}
        self.call("filter", filter_func=function, **which, **filter_options)

    def encode(self, add_generation_prompt: bool = False, **map_options: Unpack[MapOptions]) -> None:
        """Tokenise every row with the template; rows for which the template returns nothing are dropped."""
        self.call("encode", add_generation_prompt=add_generation_prompt, **map_options)

    def check(self, **filter_options: Unpack[FilterOptions]) -> None:
        """Keep the rows that the template can encode, without encoding the dataset."""
        self.call("check", **filter_options)

    def cast_column(self, column: str, decode: bool = True) -> None:
        self.call("cast_column", column=column, decode=decode)

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

    def __iter__(self) -> Iterator[Row]:
        return _stream(self)


class IterablePackingDataset(Dataset):
    """A stream of packed rows, encoded as they are read: set a template, call :meth:`pack_dataset`, iterate."""

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
        name, options = component("template_cls", template_cls, init_args)
        self.call("set_template", template_cls=name, **options)

    def pack_dataset(self) -> None:
        self.call("pack_dataset")

    def __iter__(self) -> Iterator[Row]:
        return _stream(self)


def _which(meta: AnyMeta | None) -> DatasetMeta | None:
    return None if meta is None else own_meta(meta)


def _stream(dataset: Dataset) -> Iterator[Row]:
    dataset.call("__iter__")
    try:
        while True:
            yield next_of(dataset)
    except StopIteration:
        return
