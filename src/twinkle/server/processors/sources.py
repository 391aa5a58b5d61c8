"""The places from which a worker may read rows and tokenizers: hubs, the request itself, directories that the operator
allowed, and the folders of served models. Names that a client sends reach no other files of this machine.

The library reads local files for any name that exists, so a name that a client sends must have one of a few forms
before it reaches the library. The ``datasets`` library goes further: the card of a hub's repository may name files of
this machine or of other hosts, and rows with images may name more. So the file names of a dataset are checked before
the files are read, images stay files, whose bytes templates read, and columns of other media are refused.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import DownloadError, InvalidInputError, MissingDependencyError, UnsupportedError
from twinkle.hub import HubOperation
from twinkle.server.state.files.export import allowed_path

if TYPE_CHECKING:
    import datasets

_REPOSITORY = re.compile(r"((?P<hub>hf|ms)://)?(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)", re.A)
_MODEL = re.compile(_REPOSITORY.pattern + r"(@[A-Za-z0-9][\w./-]*)?|random://[\w?=.-]+", re.A)
_SCHEME = re.compile(r"[a-z]+://")
_LABEL = re.compile(r"[^/\\\x00]{1,200}")
_MOST_SLICED = 10_000_000  # row numbers of a data_slice
_META_KEYS = ("dataset_id", "subset_name", "split", "data_slice", "data")
# Types of columns whose values are in the rows themselves, and not in files that the rows name.
_IMAGE = "Image"
_UNDECODED = {"_type": _IMAGE, "decode": False}
_FILE = {"bytes": {"dtype": "binary", "_type": "Value"}, "path": {"dtype": "string", "_type": "Value"}}
_PLAIN_COLUMNS = frozenset(
    [
        "Value",
        "ClassLabel",
        "Translation",
        "TranslationVariableLanguages",
        "LargeList",
        "List",
        "Sequence",
        "Json",
        "Array2D",
        "Array3D",
        "Array4D",
        "Array5D",
    ]
)


@dataclass(frozen=True)
class Sources:
    """The places that one worker may read and write.

    ``tokenizers``: the tokenizer folders of served models by name; None: a model without one. ``cache_dir``: where
    datasets are cached. ``hub_bytes``: the most bytes fetched from a hub's repository for its tokenizer.
    """

    allowed_dirs: Sequence[Path]
    tokenizers: Mapping[str, str | None]
    cache_dir: Path
    hub_bytes: int = 2**30

    def path(self, field: str, text: str) -> Path:
        return allowed_path(field, text, self.allowed_dirs)

    def model_folder(self, text: str) -> str:
        """Return the folder or hub id from which a template loads its tokenizer.

        ``text`` is any name of a served model, a model of a hub, ``random://…``, or an allowed directory; a UserError
        otherwise.
        """
        for name in (text, _SCHEME.sub("", text, count=1)):
            if name in self.tokenizers:
                folder = self.tokenizers[name]
                if folder is None:
                    raise UnsupportedError(f"model_id: {text!r} is served here without a tokenizer")
                return folder
        if _MODEL.fullmatch(text) and ".." not in text:
            self._check_download(text)
            return text
        if text.startswith("/"):
            return str(self.path("model_id", text))
        known = ", ".join(sorted(self.tokenizers))
        raise InvalidInputError(
            "model_id", text, f"a served model ({known}), hf://org/name, ms://org/name, random://name"
        )

    def _check_download(self, model_id: str) -> None:
        """Refuse a repository that is too large before any of it is fetched. A tokenizer takes a few megabytes."""
        size = HubOperation.template_bytes(model_id)
        if size > self.hub_bytes:
            allowed = f"a repository of at most {self.hub_bytes} bytes without weights (limits.max_hub_download_bytes)"
            raise InvalidInputError("model_id", f"{model_id}, which has {size} bytes", allowed)

    def meta(self, meta: DatasetMeta) -> DatasetMeta:
        """Return the same dataset by a checked name, which the library cannot take for another place."""
        for field, text in (("subset_name", meta.subset_name), ("split", meta.split)):
            if not _LABEL.fullmatch(text):
                raise InvalidInputError(f"dataset_meta.{field}", text, "up to 200 characters without slashes")
        if meta.data is not None or _REPOSITORY.fullmatch(meta.dataset_id):
            return meta
        if not meta.dataset_id.startswith("/"):
            allowed = "hf://org/name, ms://org/name, org/name (ModelScope), or a path in the server's allowed_dirs"
            raise InvalidInputError("dataset_meta.dataset_id", meta.dataset_id, allowed)
        path = self.path("dataset_meta.dataset_id", meta.dataset_id)
        for file in path.rglob("*") if path.is_dir() else ():
            self.path("dataset_meta.dataset_id", str(file))  # a link may lead elsewhere
        return DatasetMeta(str(path), meta.subset_name, meta.split, meta.data_slice)

    def add(self, dataset: Dataset, meta: DatasetMeta, revision: str | None = None, token: str | None = None) -> None:
        """Load rows into a dataset. ``meta`` names them and comes from :meth:`meta`, which has checked it."""
        options = {"revision": revision, "token": token}
        given = sorted(name for name, value in options.items() if value is not None)
        if meta.data is None and not meta.dataset_id.startswith("/"):
            loaded = self._hub_rows(meta, dataset.streaming, revision, token)
            dataset.add_dataset(_Loaded(meta, loaded))
        elif given:
            raise InvalidInputError(given[0], options[given[0]], "nothing: the dataset is not of a hub")
        elif meta.data is not None:
            dataset.add_dataset(meta)
        else:
            dataset.add_dataset(meta, cache_dir=str(self.cache_dir))
        try:
            dataset.datasets[meta.get_id()] = _with_files(dataset.datasets[meta.get_id()])
        except UnsupportedError:
            del dataset.datasets[meta.get_id()]
            raise

    def _hub_rows(self, meta: DatasetMeta, streaming: bool, revision: str | None, token: str | None) -> Any:
        from datasets import load_dataset_builder
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of requests or of httpx

        hub, name = HubOperation.source_type(meta.dataset_id), HubOperation.remove_source_type(meta.dataset_id)
        subset = None if meta.subset_name == "default" else meta.subset_name
        try:
            place, inside = self._place(hub, name, revision, token)
            builder = load_dataset_builder(
                place,
                name=subset,
                revision=revision if hub == "hf" else None,
                # False: a tenant without a token of its own must not read with the operator's token
                token=token or False,
                cache_dir=str(self.cache_dir),
            )
            _require_own_files(builder, inside, meta.dataset_id)
            if streaming:
                return builder.as_streaming_dataset(split=meta.split)
            builder.download_and_prepare()
            return builder.as_dataset(split=meta.split)
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            if isinstance(error, DownloadError | InvalidInputError | MissingDependencyError):
                raise
            raise DownloadError(
                f"cannot load the dataset {meta.dataset_id}: {type(error).__name__}: {error}; check name, subset, "
                "split and access rights, and whether the server reaches the hub"
            ) from error

    def _place(self, hub: str, name: str, revision: str | None, token: str | None) -> tuple[str, str]:
        """Return what the ``datasets`` library loads, and the prefix that the names of all its files must have."""
        if hub == "hf":
            return name, f"hf://datasets/{name}@"
        if revision is not None:
            raise InvalidInputError("revision", revision, "nothing with ms://: the newest is fetched")
        folder = HubOperation.download_file(f"ms://{name}", "dataset", token=token)
        return folder, f"{Path(folder).resolve()}/"


class _Loaded(DatasetMeta):
    """Rows that are already loaded, with the id of the dataset that they come from."""

    def __init__(self, source: DatasetMeta, rows: Any) -> None:
        super().__init__(split=source.split, data_slice=source.data_slice, data=rows)
        object.__setattr__(self, "_source", source)

    def get_id(self) -> str:
        source: DatasetMeta = vars(self)["_source"]
        return source.get_id()


def decoded_meta(field: str, value: Mapping[str, Any]) -> DatasetMeta:
    """Return the DatasetMeta that a client sent as a JSON object."""
    given = {key: item for key, item in value.items() if key != "_TWINKLE_TYPE_"}
    unknown = sorted(set(given) - set(_META_KEYS))
    if unknown or value.get("_TWINKLE_TYPE_") != "DatasetMeta":
        raise InvalidInputError(field, dict(value), f"a DatasetMeta with the keys {', '.join(_META_KEYS)}")
    for key in ("dataset_id", "subset_name", "split"):
        if not isinstance(given.get(key, ""), str | None):
            raise InvalidInputError(f"{field}.{key}", given[key], "text")
    data = given.get("data")
    if data is not None:
        _check_rows(f"{field}.data", data)
    return DatasetMeta(
        given.get("dataset_id") or "",
        given.get("subset_name") or "default",
        given.get("split") or "train",
        _data_slice(f"{field}.data_slice", given.get("data_slice")),
        data,
    )


def _check_rows(field: str, data: object) -> None:
    if isinstance(data, list) and all(isinstance(row, dict) for row in data):
        return
    if isinstance(data, dict) and all(isinstance(column, list) for column in data.values()):
        return
    raise InvalidInputError(field, type(data).__name__, "a list of rows (objects), or an object of columns (lists)")


def _data_slice(field: str, value: object) -> Sequence[int] | None:
    allowed = (
        'null, {"_slice_type_": "range", "start": …, "stop": …, "step": …} or {"_slice_type_": "list", "values": […]} '
        f"with at most {_MOST_SLICED} rows"
    )
    numbers: Sequence[int] | None = None
    if isinstance(value, dict) and value.get("_slice_type_") == "range":
        bounds = [value.get("start", 0), value.get("stop"), value.get("step", 1)]
        if all(type(bound) is int and abs(bound) < 2**62 for bound in bounds) and bounds[2] != 0:
            numbers = range(*bounds)
    elif isinstance(value, dict) and value.get("_slice_type_") == "list":
        values = value.get("values")
        if isinstance(values, list) and all(type(number) is int and abs(number) < 2**62 for number in values):
            numbers = values
    if value is not None and (numbers is None or len(numbers) > _MOST_SLICED):
        raise InvalidInputError(field, value, allowed)
    return numbers


def _require_own_files(builder: "datasets.DatasetBuilder", inside: str, dataset_id: str) -> None:
    for file in (str(one) for files in (builder.config.data_files or {}).values() for one in files):
        own = "::" not in file and (file if "://" in file else os.path.normpath(file)).startswith(inside)
        if not own or ".." in file.split("/"):
            raise InvalidInputError("dataset_meta.dataset_id", dataset_id, "a dataset that names files of its own only")


def _with_files(rows: Any) -> Any:
    """Return rows whose images are plain bytes and names. Refuse columns of other media before a row is read.

    With a column of type Image the ``datasets`` library would open the paths and URLs in it, when it is read or saved.
    A stream of text files has no column types, and no media.
    """
    from datasets import Features

    for name, feature in (rows.features.to_dict() if rows.features is not None else {}).items():
        kinds = _types(feature)
        media = sorted(kinds - _PLAIN_COLUMNS - {_IMAGE})
        if media:
            raise UnsupportedError(
                f"dataset_meta: column {name!r} is {media[0]}, which is not processed on the server; allowed: text, "
                "numbers, images and lists of them"
            )
        if _IMAGE in kinds:
            undecoded = rows.cast_column(name, Features.from_dict({name: _replaced(feature, _UNDECODED)})[name])
            rows = undecoded.cast_column(name, Features.from_dict({name: _replaced(feature, _FILE)})[name])
    return rows


def _replaced(feature: Any, file: Mapping[str, Any]) -> Any:
    """Return the description of a column with ``file`` in the place of images."""
    if isinstance(feature, list):
        return [_replaced(item, file) for item in feature]
    if not isinstance(feature, dict):
        return feature
    return file if feature.get("_type") == _IMAGE else {key: _replaced(item, file) for key, item in feature.items()}


def check_images(rows: Any, column: str) -> None:
    """Raise InvalidInputError unless a column can hold images: text, bytes, or bytes with a name."""
    columns = rows.features.to_dict() if rows.features is not None else {}
    if rows.features is not None and column not in columns:
        raise InvalidInputError("column", column, f"one of {', '.join(sorted(columns))}")
    kind = columns.get(column, {})
    if kind.get("dtype") not in (None, "string", "large_string", "binary", "large_binary"):
        raise InvalidInputError("column", f"{column}, of type {kind['dtype']}", "a column of image files, or of texts")


def _types(feature: Any) -> set[str]:
    if isinstance(feature, list):
        return {kind for item in feature for kind in _types(item)}
    if not isinstance(feature, dict):
        return set()
    own = {feature["_type"]} if isinstance(feature.get("_type"), str) else set()
    return own | {kind for item in feature.values() for kind in _types(item)}
