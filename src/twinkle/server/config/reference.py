"""Texts about the schema: the configuration in effect as commented YAML, and the tables of docs/configuration.md.

``python -m twinkle.server.config`` prints the tables.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import indent, wrap
from typing import get_origin

from omegaconf import OmegaConf
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from twinkle.server.config.messages import (
    ChosenBy,
    DefaultWords,
    SparseSection,
    allowed_by,
    change_texts,
    explanation,
    inner_type,
    is_section,
    plain_type,
    without_passwords,
)
from twinkle.server.config.older import older_keys
from twinkle.server.config.server_config import ServerConfig

_WIDTH = 100
_INTERPOLATION = re.compile(r"(\\*)\$\{")


# --- the configuration in effect --------------------------------------------------------------------------------------


def describe(config: BaseModel) -> str:
    """Return a configuration, or a section of one, as YAML with an explanation above each key.

    The YAML loads to an equal configuration, except for passwords, which are not shown.
    """
    text = ""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value is None and isinstance(config, SparseSection):
            continue
        text += "".join(f"# {line}\n" for line in wrap(explanation(field), _WIDTH))
        plain = config.model_dump(mode="json", include={name})[name]
        text += _key(name, value, plain)
    return text


def _key(name: str, value: object, plain: object) -> str:
    """Return a key with its value as YAML; ``plain`` is the value in JSON's types."""
    head = OmegaConf.to_yaml({name: None}).removesuffix(" null\n")  # with quotes if the name needs them
    if isinstance(value, BaseModel):
        return _under(head, describe(value))
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return _under(head, "".join(_under("-", describe(one)) for one in value))
    if isinstance(value, dict) and value and isinstance(next(iter(value.values())), BaseModel):
        return _under(head, "".join(_key(key, one, None) for key, one in value.items()))
    return OmegaConf.to_yaml({name: change_texts(plain, _literal)})


def _under(head: str, text: str) -> str:
    return f"{head}\n{indent(text, '  ')}" if text else f"{head} {{}}\n"


def _literal(text: str) -> str:
    """Return a text that OmegaConf reads back unchanged: ``${`` in it is no interpolation. Passwords become ***."""
    # A backslash before ${ makes it text; backslashes that are already there are doubled.
    return _INTERPOLATION.sub(lambda found: f"{found[1] * 2}\\${{", without_passwords(text))


# --- the reference page -----------------------------------------------------------------------------------------------


def tables() -> str:
    """Return one table for each section of the schema, and one of the older keys, in Markdown."""
    older = ((", ".join(f"`{key}`" for key in keys.split(", ")), what) for keys, what in older_keys().items())
    return "\n\n".join([*_section_tables(), _table("Older keys", "", ("older key", "what became of it"), older)])


def _section_tables() -> Iterator[str]:
    waiting: list[tuple[str, type[BaseModel]]] = [("", ServerConfig)]
    seen: set[type[BaseModel]] = set()
    while waiting:
        path, section = waiting.pop(0)
        if section in seen:
            continue
        seen.add(section)
        rows = [
            (f"`{name}`", _allowed(field), _default(field), explanation(field))
            for name, field in section.model_fields.items()
        ]
        title = f"`{path}`" if path else "Top level"
        yield _table(title, inspect.cleandoc(section.__doc__ or ""), ("key", "allowed", "default", "meaning"), rows)
        waiting += _subsections(path, section)


def _subsections(path: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    # The arguments of several applications have the same device sections.
    start = "….args" if "` of `" in path else path
    for name, field in section.model_fields.items():
        at = f"{start}.{name}".removeprefix(".")
        for mark in field.metadata:
            if isinstance(mark, ChosenBy):
                yield from ((f"{at}` of `{kind}", one) for kind, one in mark.sections.items())
        plain, inner = plain_type(field.annotation), plain_type(inner_type(field.annotation))
        if is_section(plain):
            yield at, plain
        elif is_section(inner):
            yield f"{at}{'[]' if get_origin(plain) is tuple else '.NAME'}", inner


def _table(title: str, about: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", *([about, ""] if about else []), _row(head), "|---" * len(head) + "|"]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def _allowed(field: FieldInfo) -> str:
    words = allowed_by(field)
    return "its own table below" if "with the keys" in words else words


def _default(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, DefaultWords):
            return mark.default
    if field.is_required():
        return "**required**"
    if field.default_factory is not None:
        return "empty"
    if isinstance(field.default, BaseModel):
        return ""
    shown = {None: "null", True: "true", False: "false", (): "[]"}
    is_word = field.default is None or isinstance(field.default, bool | tuple)
    return f"`{shown[field.default] if is_word else field.default}`"
