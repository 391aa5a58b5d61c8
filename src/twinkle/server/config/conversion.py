"""The way from the older form of a configuration to today's: what was changed on it, and what is done with a key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import ConfigProblem
from twinkle.server.config.problems import problem, unknown_key

__all__ = ["Conversion", "Handler", "at_least", "dropped", "only", "refused", "take_all", "to_limit"]


@dataclass
class Conversion:
    """The mapping in today's form, and what there is to say about the way there."""

    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigProblem] = field(default_factory=list)
    # limit → (older key, value); several older keys may mean the same limit
    limits: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # today's path → the path in the file

    def at_older_key(self, found: ConfigProblem) -> ConfigProblem:
        """The same problem under the key that stands in the file."""
        for path, origin in self.origins.items():
            if found.field == path or found.field.startswith(f"{path}."):
                return ConfigProblem(origin + found.field[len(path) :], found.got, found.allowed)
        return found

    def drop(self, path: str, why: str) -> None:
        self.notes.append(f"{path}: dropped, {why}")

    def became(self, path: str, what: str) -> None:
        self.notes.append(f"{path}: became {what}")

    def refuse(self, path: str, value: object, allowed: str) -> None:
        self.problems.append(problem(path, value, allowed))

    def limit(self, path: str, value: Any, name: str) -> None:
        self.limits.setdefault(name, []).append((path, value))


Handler = Callable[[Conversion, str, Any], None]


def take_all(
    conversion: Conversion, holder: dict[str, Any], key: str, at: str, handlers: Mapping[str, Handler]
) -> None:
    """Take the section ``key`` out of ``holder`` and give each of its keys to its handler."""
    section = holder.pop(key, None)
    if section is None:
        return
    if not isinstance(section, dict):
        conversion.refuse(at, section, f"a section with the keys {', '.join(handlers)}")
        return
    for name, value in section.items():
        if name not in handlers:
            conversion.problems.append(unknown_key(f"{at}.{name}", value, list(handlers)))
        elif value is not None:
            handlers[name](conversion, f"{at}.{name}", value)


def to_limit(name: str) -> Handler:
    return lambda conversion, path, value: conversion.limit(path, value, name)


def dropped(why: str) -> Handler:
    return lambda conversion, path, value: conversion.drop(path, why)


def refused(allowed: str) -> Handler:
    return lambda conversion, path, value: conversion.refuse(path, value, allowed)


def only(kept: object, why: str, allowed: str) -> Handler:
    """Dropped if the value is ``kept``, else refused."""

    def handle(conversion: Conversion, path: str, value: Any) -> None:
        if value == kept and isinstance(value, bool) == isinstance(kept, bool):
            conversion.drop(path, why)
        else:
            conversion.refuse(path, value, allowed)

    return handle


def at_least(least: float, why: str, allowed: str, none: float | None = None) -> Handler:
    """A number: dropped from ``least`` on, and where it is ``none``; else refused."""

    def handle(conversion: Conversion, path: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value >= least or value == none):
            conversion.drop(path, why)
        else:
            conversion.refuse(path, value, allowed)

    return handle
