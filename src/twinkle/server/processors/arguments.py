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
from typing import Any

from twinkle.dataset import DatasetMeta
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.server.processors.live import LiveObjects
from twinkle.server.processors.sources import Sources, decoded_meta

__all__ = ["DROPPED", "Context", "Reader", "Readers", "read_arguments"]

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
    """All arguments of a call; one that is not in the table is an error."""
    for name in given:
        if name not in readers:
            raise UnknownNameError(f"argument of {what}", name, readers or ("none",))
    read = {name: readers[name](name, value, context) for name, value in given.items()}
    return {name: value for name, value in read.items() if value is not DROPPED}


# --- plain values -----------------------------------------------------------------------------------------------------


def text(field: str, value: Any, _: Context) -> str:
    if not isinstance(value, str) or "\x00" in value:
        raise InvalidInputError(field, value, "text")
    return value


def revision(field: str, value: Any, _: Context) -> str:
    if not isinstance(value, str) or not _REVISION.fullmatch(value) or ".." in value:
        raise InvalidInputError(field, value, "a branch, tag or commit")
    return value


def boolean(field: str, value: Any, _: Context) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError(field, value, "true or false")
    return value


def integer(field: str, value: Any, _: Context) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        raise InvalidInputError(field, value, "an integer")
    return value


def count(field: str, value: Any, _: Context) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise InvalidInputError(field, value, "an integer ≥ 1")
    return value


def threads(field: str, value: Any, _: Context) -> int:
    if type(value) is not int or not 1 <= value <= 8:
        raise InvalidInputError(field, value, "1 to 8 threads")
    return value


def names(field: str, value: Any, _: Context) -> str | list[str]:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return value
    raise InvalidInputError(field, value, "a name or a list of names")


def mapping(field: str, value: Any, _: Context) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInputError(field, value, "an object")
    return value


def token_ids(field: str, value: Any, _: Context) -> list[int]:
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return value
    raise InvalidInputError(field, value, "a list of token ids")


def lists_of_token_ids(field: str, value: Any, context: Context) -> list[list[int]]:
    if not isinstance(value, list):
        raise InvalidInputError(field, value, "a list of lists of token ids")
    return [token_ids(field, one, context) for one in value]


def objects(field: str, value: Any, _: Context) -> Any:
    """A row or rows, or columns; also as JSON text, which is what clients make of their own mapping types."""
    read = _parsed(value) if isinstance(value, str) else value
    if not isinstance(read, dict | list):
        raise InvalidInputError(field, value, "an object or a list of objects")
    return read


def optional(reader: Reader) -> Reader:
    """Also null."""
    return lambda field, value, context: None if value is None else reader(field, value, context)


def only(*values: object) -> Reader:
    """An option of the library that cannot be set here: the values that leave it as it is."""

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
    """JSON text with a DatasetMeta, or the object itself."""
    read = _parsed(value) if isinstance(value, str) else value
    if not isinstance(read, dict):
        raise InvalidInputError(field, value, "a DatasetMeta (data sets are named by one, also those of a hub)")
    return context.sources.meta(decoded_meta(field, read))


def live_object(processor_type: str) -> Reader:
    """An object of the session by its id."""

    def read(field: str, value: Any, context: Context) -> Any:
        live = context.objects.get(field, value)
        if live.processor_type != processor_type:
            raise InvalidInputError(field, f"the {live.processor_type} {value}", f"the id of a {processor_type}")
        return live.thing

    return read


def class_or_object(processor_type: str, homes: Mapping[str, str]) -> Reader:
    """One of these classes by its name, or an object of the session. Names of plugins are names that nobody knows."""
    by_id = live_object(processor_type)

    def read(field: str, value: Any, context: Context) -> Any:
        if isinstance(value, str) and value.startswith(_PROCESSOR):
            return by_id(field, value, context)
        return class_named(field, value, homes)

    return read


def class_of(homes: Mapping[str, str]) -> Reader:
    return lambda field, value, _: class_named(field, value, homes)


def class_named(field: str, name: object, homes: Mapping[str, str]) -> Any:
    """The class of this name; ``homes`` are all that there are, with their modules."""
    if not isinstance(name, str) or name not in homes:
        raise UnknownNameError(field, str(name)[:200], homes or ("none",))
    return getattr(import_module(homes[name]), name)


def _parsed(value: str) -> Any:
    """What JSON text holds; any other text is not what was asked for."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
