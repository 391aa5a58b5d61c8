"""From a YAML file to a ServerConfig, with every problem named and a note on everything that was changed."""

import io
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from twinkle.errors import ConfigError, ConfigParseError, ConfigProblem
from twinkle.server.config.launchable import not_yet
from twinkle.server.config.older_form import convert
from twinkle.server.config.problems import find_problems, path_of, problem
from twinkle.server.config.server_config import DEFAULT_MODEL, ServerConfig, default_applications
from twinkle.server.config.variables import apply_variables
from twinkle.server.config.without_effect import without_effect

__all__ = ["default_config", "load_config", "load_default"]

_DEEPEST = 32


def load_config(
    path: str | Path,
    *,
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    data_dir: str | Path | None = None,
    ray_namespace: str | None = None,
) -> tuple[ServerConfig, list[str]]:
    """Read the file ``path``. The notes say what became of older keys and what has no effect here, one each.

    The arguments after it are the command line's and replace what the file says. ``model`` is for files without
    applications: it is served with a sampler.
    """
    data, problems = _read(Path(path))
    if model is not None and data.get("applications"):
        problems.append(problem("--model", model, "only with a file that has no applications"))
    elif model is not None:
        data["applications"] = default_applications(model)
    _override(data, host=host, port=port, data_dir=data_dir, ray_namespace=ray_namespace)
    return _validated(data, str(path), problems)


def default_config(
    model: str = DEFAULT_MODEL,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    data_dir: str | Path | None = None,
    backend: str = "transformers",
    aliases: tuple[str, ...] = (),
) -> ServerConfig:
    """What ``twinkle-server launch`` serves without a file: one model with its sampler, on the embedded runtime."""
    return load_default(model, host=host, port=port, data_dir=data_dir, backend=backend, aliases=aliases)[0]


def load_default(
    model: str = DEFAULT_MODEL,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    data_dir: str | Path | None = None,
    backend: str = "transformers",
    aliases: tuple[str, ...] = (),
    ray_namespace: str | None = None,
) -> tuple[ServerConfig, list[str]]:
    """The same, with notes as of :func:`load_config`."""
    data: dict[str, Any] = {
        "runtime": "embedded",
        "applications": default_applications(model, backend=backend, aliases=aliases),
    }
    _override(data, host=host, port=port, data_dir=data_dir, ray_namespace=ray_namespace)
    return _validated(data, "command line", [])


def _validated(data: dict[str, Any], source: str, problems: list[ConfigProblem]) -> tuple[ServerConfig, list[str]]:
    about_variables = apply_variables(data)
    converted = convert(data)
    problems = [*problems, *converted.problems]
    known = {one.field for one in problems}  # a key that was taken out for one reason is not also reported as missing
    found = [converted.at_older_key(one) for one in find_problems(converted.data)]
    problems += [one for one in found if one.field not in known]
    if problems:
        raise ConfigError.from_problems(problems, source)
    config = ServerConfig.model_validate(converted.data)
    notes = [*converted.notes, *about_variables, *without_effect(config), *(one.note for one in not_yet(config))]
    return config, notes


def _override(
    data: dict[str, Any],
    *,
    host: str | None,
    port: int | None,
    data_dir: str | Path | None,
    ray_namespace: str | None,
) -> None:
    listening = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if listening:
        given = data.get("http_options")
        data["http_options"] = {**(given if isinstance(given, dict) else {}), **listening}
    if data_dir is not None:
        data["data_dir"] = str(data_dir)
    if ray_namespace is not None:
        data["ray_namespace"] = ray_namespace


# --- YAML -------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The file with interpolations resolved, and the problems of those that cannot be."""
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
    """Plain containers and scalars. What cannot be resolved is left out and becomes a problem."""
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
    """``node[key]`` with its interpolation resolved."""
    try:
        return node[key]
    except OmegaConfBaseException as error:
        raw = OmegaConf.to_container(node, resolve=False)
        assert isinstance(raw, dict | list)
        reason = str(error).splitlines()[0]
        problems.append(problem(path_of((*location, key)), raw[key], f"what can be resolved: {reason}"))
        return None
