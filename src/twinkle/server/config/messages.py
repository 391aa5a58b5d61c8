"""Words for what the keys of a configuration allow, and for what is wrong with a file: key, value, what is allowed.

The schema is declared once, as types that pydantic checks. The words in errors and in docs/configuration.md are made
here from the same types, so they cannot disagree with what is checked. Pydantic's own messages name one constraint at a
time ("Input should be greater than 0"); these name all that a key allows, or the known keys where a key is unknown.

This module does not know the schema itself: the schema imports this module.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from twinkle.errors import ConfigProblem

Location = Sequence[str | int]

_ALLOWED = "allowed: {allowed}"
_LONGEST_VALUE = 120  # characters of a value that an error shows
_NAMES = {int: "an integer", float: "a number", str: "text", Path: "a path", NoneType: "null", object: "any value"}
_QUOTED_SCALAR = re.compile(r"\s*([+-]?\d[\d_.eE+-]*|true|false|null)\s*", re.I)
# Up to the last @, so that no part of a password that contains an unquoted @ is printed.
_PASSWORD_IN_ADDRESS = re.compile(r"(://[^:@]*:).*@", re.S)
_PASSWORD_IN_QUERY = re.compile(r"(password=)[^&\s'\"]+", re.I)


# --- the parts that a schema is made of -------------------------------------------------------------------------------


class Section(BaseModel):
    """A section of the configuration. The docstring under a key is its explanation on the reference page.

    Unknown keys are refused, values are not coerced ("5" is not 5, true is not 1; but whole numbers are numbers, and
    text is read as a path where a key needs one), and a section does not change after it was checked.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SparseSection(Section):
    """A section that ``describe`` prints without its null keys: a page of nulls about Ray would hide the rest."""


def refusal(allowed: str) -> PydanticCustomError:
    """Return the error for a value that is not allowed. The user sees ``allowed`` as it is."""
    return PydanticCustomError("config", _ALLOWED, {"allowed": allowed})


@dataclass(frozen=True)
class Rule:
    """A check of our own for a type. ``check`` returns the value to keep, or raises ValueError.

    ``words`` say what is allowed.
    """

    check: Callable[[Any], object]
    words: str

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._apply, handler(source))

    def _apply(self, value: object) -> object:
        try:
            return self.check(value)
        except ValueError:
            raise refusal(self.words) from None


@dataclass(frozen=True)
class Words:
    """Words for what a type of several forms allows. Without them pydantic would report an error for each form."""

    words: str

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source), "config", custom_error_message=_ALLOWED, custom_error_context={"allowed": self.words}
        )


@dataclass(frozen=True)
class DefaultWords:
    """Words for the default of a field in the reference, where it depends on other keys."""

    default: str


@dataclass(frozen=True)
class ChosenBy:
    """Chooses the section of a field by the value of another field, ``key``, which comes before it.

    Pydantic by itself would try each member of a union and report the errors of all of them.
    """

    key: str
    sections: Mapping[str, type[Section]]

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._apply, handler(source))

    def _apply(self, value: object, _handler: object, info: ValidationInfo) -> object:
        if self.key not in info.data:  # its own value is wrong, which is reported
            return value
        schema = self.sections[info.data[self.key]]
        if isinstance(value, BaseModel) and not isinstance(value, schema):
            raise refusal(schema.__name__)
        return schema.model_validate(value)


# --- types in words ---------------------------------------------------------------------------------------------------


def allowed_by(field: FieldInfo) -> str:
    """Return in words the values that a key allows."""
    return allowed_values(field.annotation, field.metadata)


def allowed_values(annotation: Any, marks: Sequence[object] = ()) -> str:
    """Return in words the values that a type allows. ``marks``: bounds and rules of ``Annotated`` and ``Field``."""
    marks = [one for mark in marks for one in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if (words := _first(marks, "words")) is not None:
        return str(words)
    if origin is Annotated:
        return allowed_values(arguments[0], [*arguments[1:], *marks])
    if origin in (Union, UnionType):
        return ", or ".join(allowed_values(one, marks) for one in arguments)
    if origin is Literal or annotation is bool:
        *others, last = arguments or ("true", "false")
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        longest = _first(marks, "max_length")
        bound = "" if longest is None else f", {longest} at most"
        return f"a list{bound}; each: {allowed_values(arguments[0])}"
    if origin is dict:
        return f"a mapping of names to {allowed_values(arguments[1])}"
    if is_section(annotation):
        return f"a section with the keys {', '.join(annotation.model_fields)}"
    return _scalar(_NAMES[annotation], marks)


def _scalar(name: str, marks: Sequence[object]) -> str:
    least, most, above = (_first(marks, bound) for bound in ("ge", "le", "gt"))
    if _first(marks, "min_length") is not None:
        return f"{name} that is not empty"
    if least is not None:
        return f"{name} ≥ {least}" if most is None else f"{name} from {least} to {most}"
    return name if above is None else f"{name} > {above}"


def _first(marks: Sequence[object], name: str) -> object:
    return next((getattr(mark, name) for mark in marks if hasattr(mark, name)), None)


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def plain_type(annotation: Any) -> Any:
    """Return a type without ``Annotated`` and without ``| None``."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    others = [one for one in get_args(annotation) if one is not NoneType]
    is_union = get_origin(annotation) in (Union, UnionType)
    return plain_type(others[0]) if is_union and len(others) == 1 else annotation


def inner_type(annotation: Any) -> Any:
    """Return the type of the elements of a list, or of the values of a mapping; None for other types."""
    plain = plain_type(annotation)
    if get_origin(plain) not in (tuple, dict):
        return None
    return get_args(plain)[0 if get_origin(plain) is tuple else 1]


def explanation(field: FieldInfo) -> str:
    """Return the description of a key on one line."""
    return " ".join((field.description or "").split())


# --- problems ---------------------------------------------------------------------------------------------------------


def problems_of(error: ValidationError, schema: type[BaseModel], data: Any) -> list[ConfigProblem]:
    """Return the problems that pydantic found in ``data``, each as a line that a user can act on."""
    return [_problem(one, schema, data) for one in error.errors(include_url=False)]


def _problem(error: ErrorDetails, schema: type[BaseModel], data: Any) -> ConfigProblem:
    path, value = path_of(error["loc"]), error["input"]
    if error["type"] == "config":
        return problem(path, value, error["ctx"]["allowed"])
    section, allowed = _look_up(error["loc"], schema, data)
    if error["type"] == "extra_forbidden":
        return unknown_key(path, value, list(section.model_fields))
    if error["type"] == "missing":
        return ConfigProblem(path, "nothing", allowed)
    if isinstance(value, str) and _QUOTED_SCALAR.fullmatch(value):
        allowed += " (without quotes; from the environment: ${oc.decode:${oc.env:NAME}})"
    return problem(path, value, allowed)


def _look_up(location: Location, schema: type[BaseModel], data: Any) -> tuple[type[BaseModel], str]:
    """Return the section that holds the last key of ``location``, and what is allowed at that key."""
    section, allowed = schema, "a mapping"
    here: Any = schema
    for depth, part in enumerate(location):
        if is_section(here):
            section, field = here, here.model_fields.get(str(part))
            if field is None:  # an unknown key
                break
            here, allowed = plain_type(field.annotation), allowed_by(field)
            for mark in field.metadata:
                if isinstance(mark, ChosenBy):
                    here = mark.sections[reduce(getitem, location[:depth], data)[mark.key]]
                    allowed = allowed_values(here)
        elif (element := inner_type(here)) is not None:
            here, allowed = plain_type(element), allowed_values(element)
    return section, allowed


def problem(path: str, value: object, allowed: str) -> ConfigProblem:
    """Return the problem of a value that is not allowed. A long value is cut; passwords in URLs are not shown."""
    return ConfigProblem(path, _shown(value), allowed)


def unknown_key(path: str, value: object, known: Sequence[str]) -> ConfigProblem:
    """Return the problem of an unknown key, with the keys that are known in its section."""
    close = get_close_matches(path.rpartition(".")[2], known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigProblem(path, f"{_shown(value)} under an unknown key", f"the keys {', '.join(known)}{hint}")


def path_of(location: Location) -> str:
    """Return a location in the notation of messages: ``applications[0].args.model_id``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def without_passwords(text: str) -> str:
    """Return ``text`` with *** for the password of a URL in it."""
    return _PASSWORD_IN_QUERY.sub(r"\1***", _PASSWORD_IN_ADDRESS.sub(r"\1***@", text))


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of plain mappings, lists and scalars with ``change`` applied to every text in it, except keys."""
    if isinstance(value, dict):
        return {key: change_texts(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [change_texts(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def _shown(value: object) -> str:
    text = without_passwords(repr(list(value) if isinstance(value, tuple) else value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
