"""What a YAML file and the environment say, as a plain mapping that the schema has not checked yet.

Environment variables stand for keys that the file leaves out. Servers of the older form knew more of them: whoever
still sets one of those is told in a note why it does nothing.
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

_DEEPEST = 32  # levels of keys; interpolations can make more without end
_OFF = ("0", "false", "no", "off")
# The name of a variable, or its beginning, and why it does nothing here.
NO_EFFECT: dict[str, str] = {
    "TWINKLE_POLL_INTERVAL": "whoever waits for a result is woken by it",
    "TWINKLE_TOKEN_SALT": "tenants are kept apart by ids of their own, under the secret in data_dir",
    "TWINKLE_FAIL_FAST": "a request that fails is always answered with its error",
    "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV": "CUDA_VISIBLE_DEVICES holds for the embedded runtime, Ray's choice on Ray",
    "TWINKLE_PERSISTENCE_": "persistence.url says where the state is",
    "TWINKLE_TELEMETRY_": "the section telemetry says what is exported",
}
# These ask for what holds anyway, unless they are switched off.
_HOLDS_ANYWAY = ("TWINKLE_FAIL_FAST", "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV")
# Read where the server is launched, and of no use in the environment of one application: the key for each.
_OF_THE_LAUNCH: dict[str, str] = {
    "TWINKLE_DEFAULT_SAVE_DIR": "data_dir",
    "TWINKLE_PER_USER_PROCESSOR_LIMIT": "limits.max_processors_per_tenant",
    "TWINKLE_LONG_POLL_TIMEOUT": "clients.long_poll_seconds",
    "TWINKLE_RAY_NAMESPACE": "ray_namespace",
}


# --- YAML -------------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return the file with its interpolations resolved, and the problems of those that cannot be."""
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
    """Return plain containers and scalars. What cannot be resolved is left out and becomes a problem."""
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
    """Return ``node[key]`` with its interpolation resolved."""
    try:
        return node[key]
    except OmegaConfBaseException as error:
        raw: Any = OmegaConf.to_container(node, resolve=False)
        reason = str(error).splitlines()[0]
        problems.append(problem(path_of((*location, key)), raw[key], f"what can be resolved: {reason}"))
        return None


# --- environment variables --------------------------------------------------------------------------------------------


def apply_variables(data: dict[str, Any]) -> list[str]:
    """Put into ``data`` what variables of this process say and ``data`` does not; return notes on all that are set."""
    notes = [f"{name}: has no effect, {why}" for name, why in _without_effect(twinkle_variables())]
    given = read_server_variables()
    seconds = given.long_poll_seconds
    values: dict[str, object] = {
        "TWINKLE_DEFAULT_SAVE_DIR": given.save_dir,
        "TWINKLE_PER_USER_PROCESSOR_LIMIT": given.processor_limit,
        # Clients ask again after a shorter poll, so they notice nothing.
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
    """Return notes on the variables of one application that do nothing. ``at``: where the configuration has them."""
    idle = [*_without_effect(variables), *((name, f"{key} is the key for it") for name, key in _OF_THE_LAUNCH.items())]
    return [f"{at}.{name}: has no effect, {why}" for name, why in idle if name in variables]


def _without_effect(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names of variables that do nothing, and why."""
    for name, value in variables.items():
        for known, why in NO_EFFECT.items():
            matches = name.startswith(known) if known.endswith("_") else name == known
            holds_anyway = name in _HOLDS_ANYWAY and value.strip().lower() not in _OFF
            if matches and not holds_anyway:
                yield name, why
