"""The options that are passed on to the ``datasets`` library. They are checked before anything runs.

Each type lists the options of tables; ``_STREAMED`` names those of ``map`` and ``filter`` that streams accept as well.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.utils.logger import note_once

__all__ = ["FilterOptions", "LoadOptions", "MapOptions", "check_filter_options", "check_load_options"]
__all__ += ["check_map_options"]


class LoadOptions(TypedDict, total=False):
    """Options for loading rows. A hub takes all of them, files and data in memory some.

    ``split`` may only repeat that of the DatasetMeta. ``trust_remote_code`` has no effect: the ``datasets`` library no
    longer runs code of a dataset's repository.
    """

    cache_dir: str
    data_dir: str
    data_files: Any
    download_config: Any
    download_mode: str
    features: Any
    keep_in_memory: bool
    num_proc: int
    revision: str
    split: str
    storage_options: Mapping[str, Any]
    streaming: bool
    token: str
    trust_remote_code: bool
    verification_mode: str


class MapOptions(TypedDict, total=False):
    """Options of ``datasets.Dataset.map``. ``batched`` is always True; only that value is accepted."""

    batch_size: int
    batched: bool
    cache_file_name: str
    desc: str
    features: Any
    fn_kwargs: Mapping[str, Any]
    keep_in_memory: bool
    load_from_cache_file: bool
    new_fingerprint: str
    num_proc: int
    remove_columns: str | list[str]
    writer_batch_size: int


class FilterOptions(TypedDict, total=False):
    """Options of ``datasets.Dataset.filter``. ``batched`` is always False; only that value is accepted."""

    batched: bool
    cache_file_name: str
    desc: str
    fn_kwargs: Mapping[str, Any]
    keep_in_memory: bool
    load_from_cache_file: bool
    new_fingerprint: str
    num_proc: int
    writer_batch_size: int


_STREAMED = {"batch_size", "batched", "features", "fn_kwargs", "remove_columns"}


def check_load_options(options: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Return the options without those that only repeat something or have no effect. ``split``: the DatasetMeta's."""
    checked = _known("load option", options, set(LoadOptions.__annotations__))
    if checked.pop("split", split) != split:
        raise InvalidInputError("split", options["split"], f"{split!r}, that of the DatasetMeta: change it there")
    if checked.pop("trust_remote_code", False):
        note_once("trust_remote_code: no effect on datasets, which are read without code of their own")
    return checked


def check_map_options(options: Mapping[str, Any], *, streaming: bool) -> dict[str, Any]:
    """Return the arguments of ``map``. Cached results are not reused unless ``load_from_cache_file`` is True."""
    names = set(MapOptions.__annotations__)
    checked = _known("map option", options, names & _STREAMED if streaming else names)
    if checked.get("batched", True) is not True:
        raise InvalidInputError("batched", checked["batched"], "True: functions get columns of many rows")
    if isinstance(checked.get("remove_columns"), str):
        checked["remove_columns"] = [checked["remove_columns"]]
    return {**({} if streaming else {"load_from_cache_file": False}), **checked, "batched": True}


def check_filter_options(options: Mapping[str, Any], *, streaming: bool) -> dict[str, Any]:
    names = set(FilterOptions.__annotations__)
    checked = _known("filter option", options, names & _STREAMED if streaming else names)
    if checked.pop("batched", False) is not False:
        raise InvalidInputError("batched", True, "False: a filter gets one row")
    return {**({} if streaming else {"load_from_cache_file": False}), **checked}


def _known(kind: str, options: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    for name in options:
        if name not in names:
            raise UnknownNameError(kind, name, names)
    return dict(options)
