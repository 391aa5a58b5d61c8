"""Apply a script's own functions to rows on the client, as the library's datasets apply them. Code is never sent.

``map`` calls a function with the columns of up to 1000 rows, and joins the columns that it returns to those that the
rows have. ``filter`` calls a function with one row.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_client.data_format import columns_to_rows, rows_to_columns
from twinkle_client.errors import invalid, unknown

__all__ = ["callable_of", "filter_rows", "map_rows"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Rows = list[Row]

_BATCH_SIZE = 1000  # of the `datasets` library
# Options of the `datasets` library about caches and processes, of which there are none here. They change no result.
_WITHOUT_EFFECT = (
    "cache_file_name",
    "desc",
    "keep_in_memory",
    "load_from_cache_file",
    "new_fingerprint",
    "num_proc",
    "writer_batch_size",
)
_MAP_OPTIONS = ("batch_size", "batched", "fn_kwargs", "remove_columns")
_FILTER_OPTIONS = ("batched", "fn_kwargs")


def callable_of(field: str, what: Any, init_args: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return the function to call: ``what`` itself, or an object of the class ``what`` made with ``init_args``."""
    if isinstance(what, type):
        made: Callable[..., Any] = what(**(init_args or {}))
        return made
    if init_args:
        logger.info("init_args: no effect, because %s is an instance or a function, not a class", field)
    function: Callable[..., Any] = what
    return function


def map_rows(rows: Sequence[Row], function: Callable[..., Any], options: Mapping[str, Any]) -> Rows:
    """Return the rows with the columns that ``function`` returns added or replaced."""
    _check("map", options, _MAP_OPTIONS)
    if options.get("batched", True) is not True:
        raise invalid("batched", options["batched"], "True: functions get columns of many rows")
    size = options.get("batch_size", _BATCH_SIZE)
    if not isinstance(size, int) or size < 1:
        raise invalid("batch_size", size, "an integer ≥ 1")
    removed = options.get("remove_columns") or ()
    removed = {removed} if isinstance(removed, str) else set(removed)
    names = list(rows_to_columns(rows))
    missing = sorted(removed - set(names))
    if missing:
        raise invalid("remove_columns", missing, f"columns of the dataset: {', '.join(names)}")
    new: Rows = []
    for start in range(0, len(rows), size):
        columns = rows_to_columns(rows[start : start + size], names)
        made = function(dict(columns), **(options.get("fn_kwargs") or {}))
        if not isinstance(made, Mapping):
            raise invalid("preprocess_func", f"a {type(made).__name__} from it", "a dict of columns")
        left = {name: values for name, values in columns.items() if name not in removed and name not in made}
        new += columns_to_rows({**left, **made})
    return new


def filter_rows(rows: Sequence[Row], function: Callable[..., Any], options: Mapping[str, Any]) -> Rows:
    """Return the rows for which ``function`` is true."""
    _check("filter", options, _FILTER_OPTIONS)
    if options.get("batched", False) is not False:
        raise invalid("batched", options["batched"], "False: the function gets one row")
    names = list(rows_to_columns(rows))
    arguments = options.get("fn_kwargs") or {}
    whole = ({name: row.get(name) for name in names} for row in rows)
    return [row for row in whole if function(dict(row), **arguments)]


def _check(method: str, options: Mapping[str, Any], used: tuple[str, ...]) -> None:
    for name in options:
        if name not in used and name not in _WITHOUT_EFFECT:
            raise unknown(f"option of {method} with a function of the script", name, (*used, *_WITHOUT_EFFECT))
