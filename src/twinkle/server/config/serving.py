"""Which models a server holds, and under which names each answers."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from twinkle.server.config.applications import ApplicationSpec, ModelArgs, SamplerArgs, ServerArgs

__all__ = ["GATEWAY_PREFIX", "PROCESSOR_PREFIX", "ServedModelConfig", "is_path", "known_name", "listed_names"]
__all__ += ["public_tokenizer_id", "served_models"]

GATEWAY_PREFIX = "/api/v1"
PROCESSOR_PREFIX = f"{GATEWAY_PREFIX}/processor"
_SCHEME = re.compile(r"[a-z]+://")
_ROUTE = re.compile(r"/api/v1/(model|sampler)/")
_VERSION = re.compile(r"[@?].*|==.*")


@dataclass(frozen=True)
class ServedModelConfig:
    """A base model, with its sampler if it has one. ``name`` is its id, or the last part of it where that is a path."""

    name: str
    aliases: tuple[str, ...]
    model: ModelArgs
    sampler: SamplerArgs | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def served_models(applications: Sequence[ApplicationSpec]) -> tuple[ServedModelConfig, ...]:
    """One entry a model application, in the order of the configuration."""
    samplers: dict[str, SamplerArgs] = {}
    routes: dict[str, list[str]] = {}
    for one in applications:
        if isinstance(one.args, ModelArgs | SamplerArgs) and one.route_prefix is not None:
            routes.setdefault(one.args.model_id, []).append(one.route_prefix)
        if isinstance(one.args, SamplerArgs):
            samplers[one.args.model_id] = one.args
    models = [one.args for one in applications if isinstance(one.args, ModelArgs)]
    return tuple(_served(args, samplers.get(args.model_id), routes.get(args.model_id, [])) for args in models)


def listed_names(applications: Sequence[ApplicationSpec]) -> tuple[str, ...]:
    """What get_server_capabilities shows."""
    for application in applications:
        if isinstance(application.args, ServerArgs) and application.args.supported_models is not None:
            return tuple(str(name) for name in application.args.supported_models)
    return tuple(name for served in served_models(applications) for name in served.names)


def known_name(name: str, known: Container[str]) -> str | None:
    """The name as it is known here; what follows a colon (``…:peft:262144``) chooses nothing."""
    scheme, separator, rest = name.rpartition("://")
    candidates = (name, scheme + separator + rest.partition(":")[0])
    return next((candidate for candidate in candidates if candidate in known), None)


def is_path(model_id: str) -> bool:
    """Whether the id is written as a directory. Clients must not see it then."""
    return model_id.startswith(("/", "~", "."))


def public_tokenizer_id(model_id: str) -> str | None:
    """What clients on other machines can load."""
    scheme, _, name = model_id.rpartition("://")
    return name if scheme in ("", "hf") and not is_path(model_id) else None


def _served(args: ModelArgs, sampler: SamplerArgs | None, routes: Sequence[str]) -> ServedModelConfig:
    local = is_path(args.model_id)
    name = args.model_id.rstrip("/").rpartition("/")[2] if local else args.model_id
    plain = name if local else _VERSION.sub("", _SCHEME.sub("", name, count=1))
    tails = [_ROUTE.sub("", route, count=1) for route in routes]
    others = dict.fromkeys([*args.aliases, plain, *tails])
    return ServedModelConfig(name, tuple(other for other in others if other != name), args, sampler)
