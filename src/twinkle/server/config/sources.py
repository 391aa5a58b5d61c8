"""Read a YAML file and the environment into a plain mapping, which the schema has not checked yet.

Environment variables stand for keys that the file leaves out. Servers of the older form read more variables; if one of
those is still set, a note says why it has no effect, unless it asks for what the server does anyway.
"""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from twinkle.environment import read_server_variables, twinkle_variables
from twinkle.errors import ConfigParseError, ConfigProblem
from twinkle.server.config.messages import path_of, problem
from twinkle.server.config.sections import ClientsConfig

_DEEPEST = 32  # levels of keys; interpolations could nest without end
_OFF = ("0", "false", "no", "off")
# Variables that have no effect, and why. A name that ends in _ stands for all variables that begin with it.
NO_EFFECT: dict[str, str] = {
    "TWINKLE_POLL_INTERVAL": "a request that waits for a result is woken by it",
    "TWINKLE_TOKEN_SALT": "tenants have ids of their own, made with the secret in data_dir",
    "TWINKLE_FAIL_FAST": "a request that fails is always answered with its error",
    "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV": "CUDA_VISIBLE_DEVICES applies when embedded; on Ray, Ray chooses devices",
    "TWINKLE_PERSISTENCE_": "persistence.url says where the state is",
    "TWINKLE_TELEMETRY_": "the section telemetry says what is exported",
}
# These ask for what the server does anyway, unless they are switched off.
_HOLDS_ANYWAY = ("TWINKLE_FAIL_FAST", "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV")
# Variables that are read where the server is launched, with the key that each stands for. In the environment of a
# single application they have no effect.
_OF_THE_LAUNCH: dict[str, str] = {
    "TWINKLE_DEFAULT_SAVE_DIR": "data_dir",
    "TWINKLE_PER_USER_PROCESSOR_LIMIT": "limits.max_processors_per_tenant",
    "TWINKLE_LONG_POLL_TIMEOUT": "clients.long_poll_seconds",
    "TWINKLE_RAY_NAMESPACE": "ray_namespace",
}


# --- YAML -------------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return the contents of the file with interpolations resolved, and problems.

    These are interpolations that cannot be resolved, keys that are not text, and nesting beyond 32 levels.
    FileNotFoundError without the file; ConfigParseError if it is not a YAML mapping in UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"configuration file not found: {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigParseError(f"{path}: not a text file in UTF-8: {error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode) and text.strip() != "null":
            raise ConfigParseError(f"{path}: the top level is not a mapping of keys to values")
        loaded = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigParseError(f"{path}: not valid YAML: {error}") from None
    problems: list[ConfigProblem] = []
    data = _resolve(loaded, (), problems)
    assert isinstance(data, dict)
    return data, problems


def _resolve(node: Any, location: tuple[str | int, ...], problems: list[ConfigProblem]) -> Any:
    """Return plain containers and scalars. A value that cannot be resolved becomes a problem.

    In a mapping it is left out, in a list it becomes None.
    """
    if len(location) > _DEEPEST:
        problems.append(ConfigProblem(path_of(location[:3]) + "…", "an endless nesting", f"{_DEEPEST} levels of keys"))
        return None
    if isinstance(node, ListConfig):
        return [_resolve(_get(node, i, location, problems), (*location, i), problems) for i in range(len(node))]
    if not isinstance(node, DictConfig):
        return node
    resolved: dict[str, Any] = {}
    for key in node:
        if not isinstance(key, str):
            problems.append(problem(path_of((*location, str(key))), key, "keys that are text"))
            continue
        before = len(problems)
        value = _get(node, key, location, problems)
        if len(problems) == before:
            resolved[key] = _resolve(value, (*location, key), problems)
    return resolved


def _get(
    node: DictConfig | ListConfig, key: Any, location: tuple[str | int, ...], problems: list[ConfigProblem]
) -> Any:
    """Return ``node[key]`` with its interpolation resolved; None, and a problem more, if it cannot be."""
    try:
        return node[key]
    except OmegaConfBaseException as error:
        raw: Any = OmegaConf.to_container(node, resolve=False)
        reason = str(error).splitlines()[0]
        problems.append(problem(path_of((*location, key)), raw[key], f"a value that can be resolved: {reason}"))
        return None


# --- environment variables --------------------------------------------------------------------------------------------


def apply_variables(data: dict[str, Any]) -> list[str]:
    """Add values of this process's variables to ``data`` where it has none.

    Return notes: on each variable that became a key, and on each variable of servers that has no effect.
    """
    notes = [f"{name}: has no effect, {why}" for name, why in _without_effect(twinkle_variables())]
    given = read_server_variables()
    seconds = given.long_poll_seconds
    values: dict[str, object] = {
        "TWINKLE_DEFAULT_SAVE_DIR": given.save_dir,
        "TWINKLE_PER_USER_PROCESSOR_LIMIT": given.processor_limit,
        # A longer time is cut to the maximum: clients ask again after a shorter poll, and notice nothing.
        "TWINKLE_LONG_POLL_TIMEOUT": None if seconds is None else min(seconds, ClientsConfig.LONGEST_POLL),
    }
    for name, value in values.items():
        if value is None:
            continue
        path = _OF_THE_LAUNCH[name]
        section, _, key = path.rpartition(".")
        holder = data.setdefault(section, {}) if section else data
        if not isinstance(holder, dict) or key in holder:
            notes.append(f"{name}: has no effect where {path} is given")
        else:
            holder[key] = value
            notes.append(f"{name}: became {path}: {value}")
    return notes


def notes_on_application(variables: Mapping[str, str], at: str) -> list[str]:
    """Return notes on variables of one application that have no effect. ``at``: their path in the configuration."""
    idle = [*_without_effect(variables), *((name, f"{key} is the key for it") for name, key in _OF_THE_LAUNCH.items())]
    return [f"{at}.{name}: has no effect, {why}" for name, why in idle if name in variables]


def _without_effect(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names of variables that have no effect, and why."""
    for name, value in variables.items():
        for known, why in NO_EFFECT.items():
            matches = name.startswith(known) if known.endswith("_") else name == known
            holds_anyway = name in _HOLDS_ANYWAY and value.strip().lower() not in _OFF
            if matches and not holds_anyway:
                yield name, why
