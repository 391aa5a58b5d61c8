"""Texts as values, and values as what a field takes."""

from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from twinkle.errors import InvalidInputError

__all__ = ["ValueCaster"]

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null", "~"), None),
}


class ValueCaster:
    """How what a person writes becomes a value."""

    @staticmethod
    def auto_cast(text: str) -> Any:
        """True, False, None, a number, a list of such between commas, else the text."""
        stripped = text.strip()
        if stripped.lower() in _WORDS:
            return _WORDS[stripped.lower()]
        for number in (int, float):
            try:
                return number(stripped)
            except ValueError:
                continue
        if "," in stripped:
            return [ValueCaster.auto_cast(part) for part in stripped.split(",") if part.strip()]
        return text

    @staticmethod
    def coerce_to_field(key: str, value: Any, hint: Any) -> Any:
        """``value`` as a field with the annotation ``hint`` takes it. A text is read first, unless the field is one."""
        kinds = _kinds(hint)
        if isinstance(value, str) and str not in kinds:
            value = ValueCaster.auto_cast(value)
        elif isinstance(value, str) and NoneType in kinds and value.strip().lower() in ("none", "null", "~"):
            value = None
        elif isinstance(value, str) and list in kinds and "," in value:
            value = ValueCaster.auto_cast(value)
        for kind in kinds:
            if type(value) is kind:
                return value
        if float in kinds and type(value) is int:
            return float(value)
        if list in kinds and str not in kinds and not isinstance(value, dict | bool | NoneType):
            return list(value) if isinstance(value, tuple) else [value]
        raise InvalidInputError(key, value, " or ".join(_NAMES[kind] for kind in kinds))


_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list (values between commas)",
    dict: "a mapping (in a YAML file)",
    NoneType: "none",
}


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes that an annotation is made of, each once."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(dict.fromkeys(get_origin(part) or part for part in parts))
