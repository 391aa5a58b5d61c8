"""What clients may give as arguments, and what it becomes. Each function reads one kind of value or refuses it.

Strings mean other things only where the kind says so: ``pid:…`` an object of the session, JSON text a DatasetMeta or
rows. A template's system prompt that looks like either stays text.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from twinkle.dataset import DatasetMeta
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.server.processors.live import LiveObjects
from twinkle.server.processors.sources import Sources, decoded_meta

T = TypeVar("T")

_PROCESSOR = "pid:"
_LARGEST = 2**53
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.A)  # it becomes part of a path in the hub's cache


@dataclass(frozen=True)
class Context:
    """What the meaning of an argument depends on."""

    objects: LiveObjects
    sources: Sources


Reader = Callable[[str, Any, Context], Any]
Readers = Mapping[str, Reader]

# What :func:`only` makes of a value that changes nothing.
DROPPED = object()


def read_arguments(what: str, readers: Readers, given: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return all arguments of a call as their readers read them. UnknownNameError for one that is not in the table."""
    for name in given:
        if name not in readers:
            raise UnknownNameError(f"argument of {what}", name, readers or ("none",))
    read = {name: readers[name](name, value, context) for name, value in given.items()}
    return {name: value for name, value in read.items() if value is not DROPPED}


# --- plain values -----------------------------------------------------------------------------------------------------


def _checked(allowed: str, is_right: Callable[[Any], bool]) -> Reader:
    """Return what takes a value as it is, or refuses it and says what is ``allowed``."""

    def read(field: str, value: Any, _: Context) -> Any:
        if not is_right(value):
            raise InvalidInputError(field, value, allowed)
        return value

    return read


def _integer(value: Any, least: int = -_LARGEST, most: int = _LARGEST) -> bool:
    return type(value) is int and least <= value <= most


def _list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


text = _checked("text", lambda value: _is_text(value) and "\x00" not in value)
revision = _checked(
    "a branch, tag or commit", lambda value: _is_text(value) and bool(_REVISION.fullmatch(value)) and ".." not in value
)
boolean = _checked("true or false", lambda value: isinstance(value, bool))
integer = _checked("an integer", _integer)
count = _checked("an integer ≥ 1", lambda value: _integer(value, 1))
threads = _checked("1 to 8 threads", lambda value: _integer(value, 1, 8))
names = _checked("a name or a list of names", lambda value: _is_text(value) or _list(value, _is_text))
mapping = _checked("an object", lambda value: isinstance(value, dict))
token_ids = _checked("a list of token ids", lambda value: _list(value, lambda token: _integer(token, 0, 2**31 - 1)))


def lists_of_token_ids(field: str, value: Any, context: Context) -> list[list[int]]:
    if not isinstance(value, list):
        raise InvalidInputError(field, value, "a list of lists of token ids")
    return [token_ids(field, one, context) for one in value]


def objects(field: str, value: Any, _: Context) -> Any:
    """Read a row, rows or columns; also as JSON text, which is what clients make of their own mapping types."""
    read = _parsed(value) if isinstance(value, str) else value
    if not isinstance(read, dict | list):
        raise InvalidInputError(field, value, "an object or a list of objects")
    return read


def optional(reader: Reader) -> Reader:
    """Return a reader that takes null, too."""
    return lambda field, value, context: None if value is None else reader(field, value, context)


def only(*values: object) -> Reader:
    """Return a reader for an option that cannot be set here: it takes the values that leave the option as it is."""

    def read(field: str, value: Any, _: Context) -> object:
        if not any(value == one and type(value) is type(one) for one in values):
            words = " or ".join(json.dumps(one) for one in values)
            raise InvalidInputError(field, value, f"{words} on the server")
        return DROPPED

    return read


# --- what stands for something else -----------------------------------------------------------------------------------


def output_path(field: str, value: Any, context: Context) -> Path:
    return context.sources.path(field, text(field, value, context))


def dataset_meta(field: str, value: Any, context: Context) -> DatasetMeta:
    """Read a DatasetMeta, as JSON text or as an object."""
    read = _parsed(value) if isinstance(value, str) else value
    if not isinstance(read, dict):
        raise InvalidInputError(field, value, "a DatasetMeta (data sets are named by one, also those of a hub)")
    return context.sources.meta(decoded_meta(field, read))


def live_object(processor_type: str) -> Reader:
    """Return a reader for an object of the session, by its id."""

    def read(field: str, value: Any, context: Context) -> Any:
        live = context.objects.get(field, value)
        if live.processor_type != processor_type:
            raise InvalidInputError(field, f"the {live.processor_type} {value}", f"the id of a {processor_type}")
        return live.thing

    return read


def class_or_object(processor_type: str, homes: Mapping[str, str]) -> Reader:
    """Return a reader for one of these classes by its name, or an object of the session. Plugins are not offered."""
    by_id = live_object(processor_type)

    def read(field: str, value: Any, context: Context) -> Any:
        if isinstance(value, str) and value.startswith(_PROCESSOR):
            return by_id(field, value, context)
        return class_named(field, value, homes)

    return read


def class_of(homes: Mapping[str, str]) -> Reader:
    return lambda field, value, _: class_named(field, value, homes)


def class_named(field: str, name: object, homes: Mapping[str, str]) -> Any:
    """Return the class of this name; ``homes`` has all that there are, with their modules."""
    return getattr(import_module(named(field, name, homes)), str(name))


def named(what: str, name: object, table: Mapping[str, T]) -> T:
    """Return what has this name in a table. UnknownNameError, which lists the names, where nothing has."""
    if not isinstance(name, str) or name not in table:
        raise UnknownNameError(what, str(name)[:200], table or ("none",))
    return table[name]


def _parsed(value: str) -> Any:
    """Return what JSON text holds; None for any other text."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
