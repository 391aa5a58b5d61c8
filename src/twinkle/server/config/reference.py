"""The schema for people: the configuration in effect as commented YAML, and the tables of docs/configuration.md.

``python -m twinkle.server.config`` prints the tables.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from twinkle.server.config.allowed import allowed_by, element_of, named_element_of, section_of
from twinkle.server.config.applications import ARGUMENTS, ApplicationSpec
from twinkle.server.config.older_form import OLDER_KEYS
from twinkle.server.config.passwords import without_passwords
from twinkle.server.config.placement import (
    AutoscalingConfig,
    DeploymentOptions,
    DeviceGroup,
    DeviceMesh,
    RayActorOptions,
    RuntimeEnv,
)
from twinkle.server.config.server_config import ServerConfig
from twinkle.server.config.tenants import SpecialLimits

__all__ = ["describe", "tables"]

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*(:[\w./-]+)*", re.A)
_INTERPOLATION = re.compile(r"(\\*)\$\{")  # a backslash before it makes it text, and is doubled to be itself
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "nan", "inf", "infinity"}
# Keys of these that were not given are left out: a page of nulls about Ray would hide the rest.
_ONLY_GIVEN = (
    AutoscalingConfig,
    DeploymentOptions,
    DeviceGroup,
    DeviceMesh,
    RayActorOptions,
    RuntimeEnv,
    SpecialLimits,
)


# --- the configuration in effect --------------------------------------------------------------------------------------


def describe(config: ServerConfig) -> str:
    """``config`` as YAML that loads to an equal one, each key under its explanation. Passwords are not shown."""
    return "\n".join(_section_lines(config, indent="")) + "\n"


def _section_lines(section: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is None and isinstance(section, _ONLY_GIVEN):
            continue
        for line in wrap(field.description or "", _WIDTH - len(indent)):
            yield f"{indent}# {line}"
        yield from _value_lines(f"{indent}{name}:", value, section, name, indent + "  ")


def _value_lines(head: str, value: object, holder: BaseModel, name: str, indent: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        lines = list(_section_lines(value, indent))
        yield head if lines else f"{head} {{}}"
        yield from lines
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        yield head
        for one in value:
            lines = list(_section_lines(one, indent + "  "))
            yield f"{indent}-" if lines else f"{indent}- {{}}"
            yield from lines
    elif isinstance(value, dict) and value and all(isinstance(one, BaseModel) for one in value.values()):
        yield head
        for key, one in value.items():
            yield f"{indent}{_scalar(key)}:"
            yield from _section_lines(one, indent + "  ")
    else:
        plain = holder.model_dump(mode="json", include={name})[name]
        yield f"{head} {_scalar(without_passwords(plain) if isinstance(plain, str) else plain)}"


def _scalar(value: Any) -> str:
    """One value on one line, as OmegaConf reads it back."""
    if isinstance(value, list):
        return f"[{', '.join(_scalar(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_scalar(key)}: {_scalar(one)}' for key, one in value.items())}}}"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        literal = _INTERPOLATION.sub(lambda found: f"{found[1] * 2}\\${{", value)
        return value if plain else json.dumps(literal, ensure_ascii=False)
    return json.dumps(value)


# --- the reference page -----------------------------------------------------------------------------------------------


def tables() -> str:
    """One table a section of the schema, and one of the older keys, in Markdown."""
    return "\n\n".join([*_section_tables(), _older_table()])


def _section_tables() -> Iterator[str]:
    waiting: list[tuple[str, type[BaseModel]]] = [("", ServerConfig)]
    seen: set[type[BaseModel]] = set()
    while waiting:
        path, section = waiting.pop(0)
        if section in seen:
            continue
        seen.add(section)
        yield _section_table(path, section)
        waiting += _subsections(path, section)


def _subsections(path: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    if section is ApplicationSpec:
        for kind, arguments in ARGUMENTS.items():
            yield f"{path}.args` of `{kind}", arguments
    for name, field in section.model_fields.items():
        inside = (element_of(field.annotation), "[]"), (named_element_of(field.annotation), ".NAME")
        for annotation, suffix in ((field.annotation, ""), *inside):
            if annotation is not None and (inner := section_of(annotation)) is not None:
                # The arguments of several applications have the same device sections.
                start = "….args" if section in ARGUMENTS.values() else path
                yield f"{start}.{name}{suffix}".removeprefix("."), inner


def _section_table(path: str, section: type[BaseModel]) -> str:
    title = f"### `{path}`" if path else "### Top level"
    rows = [title, "", section.__doc__ or "", "", "| key | allowed | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        cells = [f"`{name}`", _allowed_cell(field.annotation, allowed_by(field)), _default(section, name)]
        rows.append(f"| {' | '.join(cells)} | {field.description} |".replace("  ", " "))
    return "\n".join(rows)


def _allowed_cell(annotation: Any, words: str) -> str:
    return words if section_of(annotation) is None and "with the keys" not in words else "its own table below"


def _default(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    if field.is_required():
        return "**required**"
    if field.default is PydanticUndefined:
        return "empty" if section_of(field.annotation) is None else ""
    if isinstance(field.default, tuple):
        return "`[]`"
    return f"`{field.default if isinstance(field.default, Path) else _scalar(field.default)}`"


def _older_table() -> str:
    rows = ["### Older keys", "", "| older key | what became of it |", "|---|---|"]
    for keys, what in OLDER_KEYS.items():
        rows.append(f"| {', '.join(f'`{key}`' for key in keys.split(', '))} | {what} |")
    return "\n".join(rows)
