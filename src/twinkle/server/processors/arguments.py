"""Readers for the arguments that clients send. Each turns one kind of value into a Python value, or refuses it.

Text stands for something else only where its reader says so: ``pid:…`` names an object of the session, and JSON text
may hold a DatasetMeta or rows. A template's system prompt that looks like either stays text.
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
    """What readers need beside the value: the objects of the session, and the places that it may read."""

    objects: LiveObjects
    sources: Sources


Reader = Callable[[str, Any, Context], Any]
Readers = Mapping[str, Reader]

# Returned by readers of :func:`only`: the argument is accepted and left out of the call.
DROPPED = object()


def read_arguments(what: str, readers: Readers, given: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return the arguments of a call, each read by its reader, without those that readers of :func:`only` drop.

    Raise UnknownNameError for an argument without a reader. ``what``: the function that is called, for this error.
    """
    for name in given:
        if name not in readers:
            raise UnknownNameError(f"argument of {what}", name, readers or ("none",))
    read = {name: readers[name](name, value, context) for name, value in given.items()}
    return {name: value for name, value in read.items() if value is not DROPPED}


# --- plain values -----------------------------------------------------------------------------------------------------


def _checked(allowed: str, is_right: Callable[[Any], bool]) -> Reader:
    """Return a reader that returns a value unchanged, or refuses it and says what is ``allowed``."""

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
    """Read a row, rows or columns. JSON text is accepted too: clients send their own mapping types as such."""
    read = _parsed(value) if isinstance(value, str) else value
    if not isinstance(read, dict | list):
        raise InvalidInputError(field, value, "an object or a list of objects")
    return read


def optional(reader: Reader) -> Reader:
    """Return a reader that also accepts null."""
    return lambda field, value, context: None if value is None else reader(field, value, context)


def only(*values: object) -> Reader:
    """Return a reader for an option that clients cannot change: it accepts ``values``, the defaults, and drops them."""

    def read(field: str, value: Any, _: Context) -> object:
        if not any(value == one and type(value) is type(one) for one in values):
            words = " or ".join(json.dumps(one) for one in values)
            raise InvalidInputError(field, value, f"{words} on the server")
        return DROPPED

    return read


# --- values that name something else ----------------------------------------------------------------------------------


def output_path(field: str, value: Any, context: Context) -> Path:
    return context.sources.path(field, text(field, value, context))


def dataset_meta(field: str, value: Any, context: Context) -> DatasetMeta:
    """Read a DatasetMeta, as JSON text or as an object."""
    read = _parsed(value) if isinstance(value, str) else value
    if not isinstance(read, dict):
        raise InvalidInputError(field, value, "a DatasetMeta, also to name a dataset of a hub")
    return context.sources.meta(decoded_meta(field, read))


def live_object(processor_type: str) -> Reader:
    """Return a reader that turns an id into the session's object of this type."""

    def read(field: str, value: Any, context: Context) -> Any:
        live = context.objects.get(field, value)
        if live.processor_type != processor_type:
            raise InvalidInputError(field, f"the {live.processor_type} {value}", f"the id of a {processor_type}")
        return live.thing

    return read


def class_or_object(processor_type: str, homes: Mapping[str, str]) -> Reader:
    """Return a reader for the name of one of these classes, or the id of an object. Plugins are not accepted."""
    by_id = live_object(processor_type)

    def read(field: str, value: Any, context: Context) -> Any:
        if isinstance(value, str) and value.startswith(_PROCESSOR):
            return by_id(field, value, context)
        return class_named(field, value, homes)

    return read


def class_of(homes: Mapping[str, str]) -> Reader:
    return lambda field, value, _: class_named(field, value, homes)


def class_named(field: str, name: object, homes: Mapping[str, str]) -> Any:
    """Return the class of this name. ``homes`` maps the names of all allowed classes to their modules."""
    return getattr(import_module(named(field, name, homes)), str(name))


def named(what: str, name: object, table: Mapping[str, T]) -> T:
    """Return the entry of a table by its name. Raise UnknownNameError, which lists all names, if there is none."""
    if not isinstance(name, str) or name not in table:
        raise UnknownNameError(what, str(name)[:200], table or ("none",))
    return table[name]


def _parsed(value: str) -> Any:
    """Return the value of JSON text; None for text that is not JSON."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
