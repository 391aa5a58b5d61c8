"""Other names of models: what a server calls a model in its routes, mapped to the id it loads."""

from collections.abc import Iterable, Mapping

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError

__all__ = ["MODEL_ID_ALIASES_ENV", "build_model_alias_map", "load_model_alias_map", "resolve_model_id_alias"]

MODEL_ID_ALIASES_ENV = "TWINKLE_MODEL_ID_ALIASES"

_MODEL_ROUTES = "/model/"


def build_model_alias_map(applications: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """The public name of every model application (what follows ``/model/`` in its route) to its model id."""
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
    """The aliases in TWINKLE_MODEL_ID_ALIASES."""
    return dict(read_environment().model_id_aliases)


def resolve_model_id_alias(model_id: str) -> str:
    """The model id behind an alias; anything else is returned as it is."""
    return load_model_alias_map().get(model_id, model_id)
