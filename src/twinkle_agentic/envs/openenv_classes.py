"""Packages of the OpenEnv project: how their classes are found, and how their results become texts and rewards.

Such a package exports an action class ``…Action`` and a client ``…Env``; the environment itself is a class
``…Environment`` in a module ``…_environment`` or ``…_env`` of its subpackage ``server``.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from twinkle.errors import InvalidInputError
from twinkle.extras import missing
from twinkle_agentic.envs.base import StepResult

__all__ = [
    "ActionMapper",
    "ClassOrName",
    "action_class",
    "client_class",
    "environment_class",
    "make_action",
    "named_class",
    "program_output",
    "step_result",
]

ActionMapper = Callable[[str, Mapping[str, Any]], Any]
ClassOrName = type | str


@runtime_checkable
class _Result(Protocol):
    observation: Any
    reward: float | None
    done: bool


@runtime_checkable
class _Observation(Protocol):
    reward: float | None
    done: bool


@runtime_checkable
class _Model(Protocol):
    """A pydantic model."""

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


# --- classes ----------------------------------------------------------------------------------------------------------


def named_class(given: ClassOrName, option: str) -> type:
    """Return a class that is given as itself or as 'module:Class' or 'module.Class'."""
    if isclass(given):
        return given
    allowed = "a class, or its name as 'module:Class' or 'module.Class'"
    if not isinstance(given, str):
        raise InvalidInputError(option, given, allowed)
    module, _, name = given.partition(":") if ":" in given else given.rpartition(".")
    if not module or not name:
        raise InvalidInputError(option, given, allowed)
    found = getattr(_module(module), name, None)
    if not isclass(found):
        raise InvalidInputError(option, given, f"{allowed}; {module} has no class {name}")
    return found


def environment_class(package: str) -> type:
    """Return the one class ``…Environment`` that the modules of ``<package>.server`` define."""
    found_package = _module(package)
    if "server" not in {each.name for each in iter_modules(getattr(found_package, "__path__", []))}:
        allowed = "an OpenEnv package with a subpackage server; OpenEnvClient is for environments that run as a service"
        raise InvalidInputError("env_name", package, allowed)
    server = _module(f"{package}.server")
    names = [each.name for each in iter_modules(getattr(server, "__path__", []))]
    found: dict[str, type] = {}
    for ending in ("_environment", "_env"):
        for name in names:
            if name.endswith(ending) and not found:
                found |= _own_classes(_module(f"{package}.server.{name}"), "Environment")
    return _only(found, "env_cls", f"{package}.server, in a module named …_environment or …_env")


def client_class(package: str) -> type:
    """Return the one class ``…Env`` that a package exports."""
    return _only(_exported(_module(package), "Env"), "env_cls", package)


def action_class(package: str) -> type:
    """Return the one class ``…Action`` that a package exports."""
    return _only(_exported(_module(package), "Action"), "action_cls", package)


def _exported(module: ModuleType, ending: str) -> dict[str, type]:
    """Return the classes of a module by name, without OpenEnv's own base classes, which are called ``ending``."""
    named = {name: value for name, value in vars(module).items() if name.endswith(ending) and name != ending}
    return {name: value for name, value in named.items() if isclass(value)}


def _own_classes(module: ModuleType, ending: str) -> dict[str, type]:
    return {n: value for n, value in _exported(module, ending).items() if value.__module__ == module.__name__}


def _only(found: Mapping[str, type], option: str, place: str) -> type:
    if len(set(found.values())) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise InvalidInputError(option, None, f"a class; {place} must have one of this kind but has: {names}")
    return next(iter(found.values()))


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise missing(error.name or name, "OpenEnv") from error


# --- actions and results ----------------------------------------------------------------------------------------------


def make_action(
    tool_name: str, arguments: Mapping[str, Any], mapper: ActionMapper | None, action_cls: type | None
) -> Any:
    """Return the action of a tool call: the mapper's, or an object of the class with the arguments as fields.

    A mapper may return the fields of the class as a mapping.
    """
    action = arguments if mapper is None else mapper(tool_name, arguments)
    if action_cls is None or not isinstance(action, Mapping):
        return action
    return action_cls(**action)


def step_result(result: Any) -> StepResult:
    """Return a result of OpenEnv as ours: it has an observation, a reward and done, or is itself the observation."""
    if isinstance(result, _Result):
        observation = result.observation
    elif isinstance(result, _Observation):
        observation = result
    else:
        raise InvalidInputError("result of the environment", result, "an observation, a reward and done")
    return StepResult(_text(observation), float(result.reward or 0.0), bool(result.done), {"observation": observation})


def _text(observation: Any) -> str:
    """Return an observation as the text that a model reads.

    A text stays unchanged, the output of a program is its standard output and error, anything else becomes JSON.
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, _Model):
        observation = observation.model_dump(mode="json")
    elif dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        observation = dataclasses.asdict(observation)
    if isinstance(observation, Mapping) and isinstance(observation.get("stdout"), str):
        return program_output(observation["stdout"], observation.get("stderr"), observation.get("exit_code"))
    return json.dumps(observation, ensure_ascii=False, default=str)


def program_output(stdout: str, stderr: str | None, exit_code: int | None) -> str:
    """Return what a program wrote, and its exit code unless it is 0."""
    parts = [stdout.rstrip("\n"), (stderr or "").rstrip("\n"), f"exit code: {exit_code}" if exit_code else ""]
    return "\n".join(part for part in parts if part)
