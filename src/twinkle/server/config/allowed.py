"""What a key of the configuration allows: checked by pydantic and said in words, both from one declaration.

Errors and the reference page take their words from here, so they cannot disagree with what is checked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = [
    "STRICT",
    "Later",
    "Rule",
    "allowed_by",
    "element_of",
    "in_words",
    "named_element_of",
    "refusal",
    "section_of",
]

# Nothing unknown, nothing coerced ("5" is not 5, true is not 1; whole numbers are numbers), nothing changed afterwards.
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def refusal(allowed: str) -> PydanticCustomError:
    """The error of a value that is not allowed; ``allowed`` reaches the user as it is."""
    return PydanticCustomError("config", "allowed: {allowed}", {"allowed": allowed})


@dataclass(frozen=True)
class Rule:
    """A check of our own in a type: ``check`` returns the value to keep, or raises ValueError."""

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
class Later:
    """Values that are part of the format and not implemented yet, each with the reason."""

    reasons: Mapping[object, str]

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: object) -> object:
            if value in self.reasons:
                raise refusal(_words(source, [self]))
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


def allowed_by(field: FieldInfo) -> str:
    """The values of ``field`` in words."""
    return _words(field.annotation, field.metadata)


def in_words(annotation: Any) -> str:
    """The values of a type in words."""
    return _words(annotation, [])


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key of this type holds, if it holds one."""
    plain, _ = _plain(annotation)
    return plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None


def element_of(annotation: Any) -> Any:
    """The type of the elements of a list; None for other types."""
    plain, _ = _plain(annotation)
    return get_args(plain)[0] if get_origin(plain) is tuple else None


def named_element_of(annotation: Any) -> Any:
    """The type of what a mapping of names holds; None for other types."""
    plain, _ = _plain(annotation)
    return get_args(plain)[1] if get_origin(plain) is dict else None


def _plain(annotation: Any) -> tuple[Any, bool]:
    """Without ``Annotated`` and without ``| None``, and whether it had the latter."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [one for one in get_args(annotation) if one is not NoneType]
        if len(others) == 1:
            return _plain(others[0])[0], True
    return annotation, False


def _words(annotation: Any, metadata: Sequence[object]) -> str:
    metadata = [one for mark in metadata for one in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    for mark in metadata:
        if isinstance(mark, Rule):
            return mark.words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, UnionType):
        return ", or ".join(_words(one, metadata) for one in arguments)
    if origin is Literal or annotation is bool:
        return _choice(arguments or (True, False), metadata)
    if origin is tuple:
        longest = next((mark.max_length for mark in metadata if isinstance(mark, MaxLen)), None)
        bound = "" if longest is None else f", {longest} at most"
        return f"a list{bound}; each: {_words(arguments[0], [])}"
    if origin is dict:
        return f"a mapping of names to {_words(arguments[1], [])}"
    if (section := section_of(annotation)) is not None:
        return f"a section with the keys {', '.join(section.model_fields)}"
    return _scalar(annotation, metadata)


def _choice(values: Sequence[object], metadata: Sequence[object]) -> str:
    later = {value: why for mark in metadata if isinstance(mark, Later) for value, why in mark.reasons.items()}
    *others, last = [_yaml_word(value) for value in values if value not in later]
    now = f"{', '.join(others)} or {last}" if others else last
    reasons = "; ".join(f"{_yaml_word(value)}: {why}" for value, why in later.items())
    return f"{now} (not yet {reasons})" if reasons else now


def _yaml_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar(annotation: Any, metadata: Sequence[object]) -> str:
    names = {int: "an integer", float: "a number", str: "text", Path: "a path", NoneType: "null", object: "any value"}
    name = names[annotation]
    if any(isinstance(mark, MinLen) for mark in metadata):
        return f"{name} that is not empty"
    bounds = {type(mark): mark for mark in metadata}
    low, high, above = bounds.get(Ge), bounds.get(Le), bounds.get(Gt)
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"{name} from {low.ge} to {high.le}"
    if isinstance(low, Ge):
        return f"{name} ≥ {low.ge}"
    return f"{name} > {above.gt}" if isinstance(above, Gt) else name
