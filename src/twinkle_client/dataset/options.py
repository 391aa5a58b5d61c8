"""Arguments of the ``datasets`` library that a server takes; it refuses values that would change how it works."""

from typing import TypedDict

__all__ = ["FilterOptions", "LoadOptions", "MapOptions"]


class LoadOptions(TypedDict, total=False):
    revision: str
    token: str


class MapOptions(TypedDict, total=False):
    """``batched`` may be given and is always True."""

    batch_size: int
    batched: bool
    desc: str
    keep_in_memory: bool
    load_from_cache_file: bool
    num_proc: int  # 1
    remove_columns: str | list[str]
    writer_batch_size: int


class FilterOptions(TypedDict, total=False):
    """``batched`` may be given and is always False."""

    batched: bool
    desc: str
    keep_in_memory: bool
    load_from_cache_file: bool
    num_proc: int  # 1
    writer_batch_size: int
