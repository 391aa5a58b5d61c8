"""The sources of settings. Each returns a flat mapping of keys to values; texts are not converted yet."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.cli.fields import ConfigRegistry, normalized
from twinkle.environment import twinkle_variables
from twinkle.errors import InvalidInputError
from twinkle.extras import missing

__all__ = ["CLISource", "ConfigSource", "DotEnvSource", "EnvVarSource", "YamlSource"]

_PREFIX = "TWINKLE_"


class ConfigSource(ABC):
    @abstractmethod
    def load(self) -> dict[str, Any]: ...


class DotEnvSource(ConfigSource):
    """``KEY=value`` lines of ``path``; without a path, of ``.env`` or else ``.env.local`` in the working directory.

    The prefix ``TWINKLE_`` of a key is removed.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)

    def load(self) -> dict[str, Any]:
        if self._path is not None:
            return dict(_lines(self._path.read_text()))
        for path in (Path(".env"), Path(".env.local")):
            if path.is_file():
                return dict(_lines(path.read_text()))
        return {}


class EnvVarSource(ConfigSource):
    """Variables ``TWINKLE_<KEY>``, also for keys that no field has. Names without the prefix (HOST …) are not read.

    Variables that may hold a secret are left out unless they name a field, because scripts log their options.
    """

    def __init__(self, registry: ConfigRegistry) -> None:
        self._registry = registry

    def load(self) -> dict[str, Any]:
        named = {name.removeprefix(_PREFIX).lower(): value for name, value in twinkle_variables().items() if value}
        return {key: value for key, value in named.items() if self._registry.resolve(key) or not _may_be_secret(key)}


class YamlSource(ConfigSource):
    """A YAML file, read by OmegaConf with its ``${…}``.

    Keys of nested maps are joined with ``_``, down to the level at which they name a field.
    """

    def __init__(self, path: str | Path, registry: ConfigRegistry | None = None) -> None:
        self._path = Path(path)
        self._registry = registry

    def load(self) -> dict[str, Any]:
        if not self._path.is_file():
            raise FileNotFoundError(f"config: file {self._path} does not exist")
        try:
            from omegaconf import OmegaConf
        except ImportError as error:
            raise missing("omegaconf", "a YAML file of options") from error
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        try:
            content = OmegaConf.to_container(OmegaConf.load(self._path), resolve=True)
        except (YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
            raise InvalidInputError("config", str(self._path), f"a YAML file ({error})") from error
        if not isinstance(content, dict):
            raise InvalidInputError("config", str(self._path), "a YAML file with a mapping at its top")
        return dict(self._flat(content, ""))

    def _flat(self, content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in content.items():
            key = f"{prefix}{name}"
            whole = self._registry is not None and self._registry.resolve(key) is not None
            if isinstance(value, Mapping) and not whole:
                yield from self._flat(value, f"{key}_")
            else:
                yield key, value


class CLISource(ConfigSource):
    """The command line: ``--key value``, ``--key=value``, ``--flag`` (true), ``--no-flag`` (false).

    ``--flag`` is true only if the next word begins with ``--`` or there is none; else that word is its value.

    Words that do not begin with ``--`` and are not the value of a key are ignored.
    """

    def __init__(self, argv: Sequence[str] | None = None) -> None:
        self._argv = list(sys.argv[1:] if argv is None else argv)

    def load(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        words = iter(enumerate(self._argv))
        for place, word in words:
            if not word.startswith("--") or word == "--":
                continue
            key, has_value, value = word[2:].partition("=")
            key = normalized(key)
            if has_value:
                found[key] = value
            elif key.startswith("no_"):
                found[key.removeprefix("no_")] = False
            elif place + 1 < len(self._argv) and not self._argv[place + 1].startswith("--"):
                found[key] = next(words)[1]
            else:
                found[key] = True
        return found


def _may_be_secret(key: str) -> bool:
    return key == "notifier" or any(part in ("token", "secret", "key", "salt") for part in key.split("_"))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        stripped = line.strip().removeprefix("export ").strip()
        if stripped.startswith("#") or "=" not in stripped:
            continue
        name, _, value = stripped.partition("=")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        else:
            value = value.partition(" #")[0].rstrip()
        yield name.strip().removeprefix(_PREFIX).lower(), value
