"""From pydantic's errors to lines a person can act on: path of the key, the value, what is allowed."""

import re
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from twinkle.errors import ConfigProblem
from twinkle.server.config.allowed import allowed_by, element_of, in_words, section_of
from twinkle.server.config.applications import ARGUMENTS, ApplicationSpec
from twinkle.server.config.passwords import without_passwords
from twinkle.server.config.rules import Broken, application_rules, network_rules
from twinkle.server.config.sections import AuthConfig, HttpOptions
from twinkle.server.config.server_config import ServerConfig

__all__ = ["find_problems", "path_of", "problem", "unknown_key"]

Location = Sequence[str | int]

_QUOTED_SCALAR = re.compile(r"\s*([+-]?\d[\d_.eE+-]*|true|false|null)\s*", re.I)
_LONGEST = 120
_APPLICATIONS = TypeAdapter(tuple[ApplicationSpec, ...])


def find_problems(data: dict[str, Any]) -> list[ConfigProblem]:
    """All that is wrong with ``data``; empty if it is a valid configuration."""
    try:
        ServerConfig.model_validate(data)
    except ValidationError as error:
        found = [_from_error(one, data) for one in error.errors(include_url=False)]
        found += [problem(path_of(one.location), one.value, one.allowed) for one in _broken_rules(data)]
        return list(dict.fromkeys(found))
    return []


def problem(path: str, value: object, allowed: str) -> ConfigProblem:
    """A value that is not allowed. Passwords in URLs are not shown."""
    return ConfigProblem(path, _shown(value), allowed)


def unknown_key(path: str, value: object, known: Sequence[str]) -> ConfigProblem:
    """A key that nobody knows, with those that are known there."""
    close = get_close_matches(re.split(r"\.", path)[-1], known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigProblem(path, f"{_shown(value)} under an unknown key", f"the keys {', '.join(known)}{hint}")


def path_of(location: Location) -> str:
    """``applications[0].args.model_id``"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _shown(value: object) -> str:
    text = without_passwords(repr(list(value) if isinstance(value, tuple) else value))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _broken_rules(data: dict[str, Any]) -> list[Broken]:
    """Rules between sections are not reached while a section is wrong: try those whose own sections are right."""
    broken: list[Broken] = []
    with suppress(ValidationError):  # what is wrong in a section itself is reported already
        http = HttpOptions.model_validate(data.get("http_options", {}))
        broken += network_rules(http, AuthConfig.model_validate(data.get("auth", {})))
    with suppress(ValidationError):
        applications = _APPLICATIONS.validate_python(data.get("applications", []), strict=False)
        broken += application_rules(applications, str(data.get("runtime", "embedded")))
    return broken


def _from_error(error: ErrorDetails, data: dict[str, Any]) -> ConfigProblem:
    location, section, words = _walk(error["loc"], data)
    path, value = path_of(location), error["input"]
    if error["type"] == "extra_forbidden" and section is not None:
        return unknown_key(path, value, list(section.model_fields))
    if error["type"] == "missing":
        return ConfigProblem(path, "nothing", words)
    context = error.get("ctx", {})
    allowed = str(context["allowed"]) if error["type"] == "config" else words
    if error["type"] != "config" and isinstance(value, str) and _QUOTED_SCALAR.fullmatch(value):
        allowed += " (without quotes; from the environment: ${oc.decode:${oc.env:NAME}})"
    return problem(path, value, allowed)


def _walk(location: Location, data: dict[str, Any]) -> tuple[list[str | int], type[BaseModel] | None, str]:
    """The visible part of pydantic's location, the section that holds its last key, and what that key allows."""
    here: Any = ServerConfig
    section: type[BaseModel] | None = None
    visible: list[str | int] = []
    words = "a mapping"
    for part in location:
        if isinstance(part, int):
            here, section = element_of(here), None
            words = words if here is None else in_words(here)
        elif (holder := section_of(here)) is not None:
            section, field = holder, holder.model_fields.get(part)
            here = None if field is None else field.annotation
            words = words if field is None else allowed_by(field)
            if holder is ApplicationSpec and part == "args":
                here = ARGUMENTS[_value_at(data, [*visible, "import_path"])]
                words = f"a section with the keys {', '.join(here.model_fields)}"
        elif here is not None:
            continue  # pydantic's name for a member of a union
        visible.append(part)
    return visible, section, words


def _value_at(data: Any, location: Location) -> Any:
    for part in location:
        data = data[part]
    return data
