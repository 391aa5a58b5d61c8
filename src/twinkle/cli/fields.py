"""Find the group and field of a key, and convert what a person writes to a value of that field."""

from collections.abc import Mapping
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from twinkle.cli.args import PRIMARY
from twinkle.errors import InvalidInputError

__all__ = ["ConfigRegistry", "ValueCaster", "normalized"]

# Words that are read as values, in upper or lower case.
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null", "~"), None),
}
# How error messages describe the allowed values of a type.
_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list (values between commas)",
    dict: "a mapping (in a YAML file)",
    NoneType: "none",
}
# Common other names of fields.
_ALIASES = {"lr": "learning_rate", "num_gpus": "nproc_per_node", "max_new_tokens": "max_tokens"}


class ConfigRegistry:
    """The index of fields by key. ``groups`` maps names to dataclasses or instances of dataclasses."""

    def __init__(self, groups: Mapping[str, Any]) -> None:
        owners: dict[str, list[tuple[str, Field[Any]]]] = {}
        for group, described in groups.items():
            for each in fields(described):
                owners.setdefault(each.name, []).append((group, each))
        self._by_key = {
            f"{group}_{name}": (group, name) for name, group_fields in owners.items() for group, _ in group_fields
        }
        self._by_key |= {name: (_owner(name, group_fields), name) for name, group_fields in owners.items()}

    def resolve(self, key: str) -> tuple[str, str] | None:
        """Return group and field for a field's name, an alias, or ``<group>_<field>``; None if no field matches."""
        name = normalized(key)
        return self._by_key.get(_ALIASES.get(name, name))

    def all_keys(self) -> list[str]:
        return sorted({*self._by_key, *_ALIASES})


def normalized(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _owner(name: str, group_fields: list[tuple[str, Field[Any]]]) -> str:
    if len(group_fields) == 1:
        return group_fields[0][0]
    primary = [group for group, each in group_fields if each.metadata.get(PRIMARY)]
    if len(primary) != 1:
        groups = ", ".join(group for group, _ in group_fields)
        raise ValueError(f"{name!r} is a field of {groups}: exactly one of them must be marked as primary")
    return primary[0]


class ValueCaster:
    """Conversion of what a person writes into values."""

    @staticmethod
    def auto_cast(text: str) -> Any:
        """Return the text as True, False, None, a number, or a list (values between commas); else the text itself."""
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
        """Return ``value`` as a value of the type ``hint``; raise if it does not fit.

        A text is first read with :meth:`auto_cast`. If the field also takes a text, only these are read: "none", "null"
        and "~" if it takes None, and a text with a comma if it takes a list. A field that takes true or false also
        takes 1 and 0.
        """
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
        if bool in kinds and type(value) is int and value in (0, 1):
            return value == 1
        if float in kinds and type(value) is int:
            return float(value)
        if list in kinds and str not in kinds and not isinstance(value, dict | bool | NoneType):
            return list(value) if isinstance(value, tuple) else [value]
        raise InvalidInputError(key, value, " or ".join(_NAMES[kind] for kind in kinds))


def _kinds(hint: Any) -> tuple[type, ...]:
    """Return the classes that an annotation is made of, each once."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(dict.fromkeys(get_origin(part) or part for part in parts))
