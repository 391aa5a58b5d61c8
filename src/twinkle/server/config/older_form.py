"""Keys of the older form of the configuration: each becomes a key of today's, is dropped with a note, or is refused.

Works on plain mappings before they are validated; values of the wrong type are passed on for the schema to refuse.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import ConfigProblem
from twinkle.server.config.problems import path_of, problem, unknown_key
from twinkle.server.config.serving import GATEWAY_PREFIX

__all__ = ["OLDER_KEYS", "Conversion", "convert"]

# What became of each older key, for people: the table of the reference page, and checked by a test. ARGS stands for
# applications[].args.
OLDER_KEYS: dict[str, str] = {
    "server_type": "dropped: one server speaks both protocols",
    "telemetry_config": "`telemetry`",
    "persistence_config": "`persistence`",
    "persistence.mode": "memory and file: SQLite (`persistence.url`); redis: refused",
    "persistence.file_path": "dropped: the state is in `persistence.url`",
    "persistence.redis_url": "refused: use `persistence.url`",
    "persistence.key_prefix": "dropped: each server has a database of its own",
    "task_queue, ARGS.queue_config": "the rows below; the table itself is gone",
    "….max_input_tokens": "`limits.max_tokens_per_request`",
    "….rps_limit, ….tps_limit": "refused: rate limits come later, with the other limits on a tenant's use",
    "….window_seconds, ….token_cleanup_multiplier, ….token_cleanup_interval": "refused: they belong to rate limits",
    "….queue_timeout": "refused: what was accepted is computed, however long it waits",
    "….execution_timeout": "0: dropped, it meant none; else refused: nothing is stopped while it computes",
    "….enabled": "true: dropped; false: refused, raise the limits instead",
    "applications[].route_prefix": "server: `/server` and `/` become `/api/v1`; `/models/NAME` becomes "
    "`/api/v1/model/NAME`, `/samplers/NAME` becomes `/api/v1/sampler/NAME`",
    "ARGS.server_config.per_token_model_limit": "`limits.max_adapters_per_tenant`",
    "ARGS.server_config.expiration_timeout": "`limits.session_timeout_seconds`",
    "ARGS.server_config.cleanup_interval": "dropped: expiry needs no interval",
    "ARGS.server_config.metrics_update_interval": "dropped: metrics are taken when they are asked for",
    "ARGS.server_config.actor_name": "dropped: the state is no actor",
    "ARGS.http_options, ARGS.route_prefix": "dropped where they repeat the top level and `/api/v1`; else refused",
    "ARGS.use_megatron": "false: `backend: transformers`; true: `backend: megatron`",
    "ARGS.max_loras": "`limits.max_adapters_per_tenant`",
    "ARGS.max_length": "`limits.max_tokens_per_request`",
    "ARGS.adapter_config.adapter_timeout": "`limits.session_timeout_seconds`",
    "ARGS.adapter_config.per_token_adapter_limit": "`limits.max_adapters_per_tenant`",
    "ARGS.adapter_config.adapter_max_lifetime": "refused: an adapter lives as long as its session",
}

_RATES = "nothing (rate limits come later, with the other limits on a tenant's use); remove the key"


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


def convert(data: Mapping[str, Any]) -> Conversion:
    """``data`` in today's form. The argument is left as it is."""
    conversion = Conversion(deepcopy(dict(data)))
    _top_level(conversion)
    _persistence(conversion)
    applications = conversion.data.get("applications")
    if isinstance(applications, list):
        for index, application in enumerate(applications):
            if isinstance(application, dict):
                _application(conversion, application, path_of(("applications", index)))
    _limits(conversion)
    return conversion


def _top_level(conversion: Conversion) -> None:
    data = conversion.data
    for section in (
        "http_options",
        "auth",
        "clients",
        "limits",
        "persistence",
        "telemetry",
        "logging",
        "applications",
        "task_queue",
    ):
        if section in data and data[section] is None:  # a heading with nothing under it
            del data[section]
    for older, today in (("telemetry_config", "telemetry"), ("persistence_config", "persistence")):
        if older in data and today in data:
            conversion.refuse(older, data.pop(older), f"{today} alone, which is there too")
        elif older in data:
            data[today] = data.pop(older) or {}
            conversion.origins[today] = older
            conversion.became(older, today)
    if "server_type" in data:
        kind = data.pop("server_type")
        if kind in ("tinker", "twinkle"):
            conversion.drop("server_type", "one server speaks both protocols")
        else:
            conversion.refuse("server_type", kind, "nothing: one server speaks both protocols; remove the key")
    if data.get("applications") and "runtime" not in data:
        data["runtime"] = "ray"
        conversion.notes.append(
            "runtime: not given, ray is used, as for every file with applications; embedded would be one process"
        )
    _take_all(conversion, data, "task_queue", "task_queue", _QUEUE)


def _persistence(conversion: Conversion) -> None:
    section = conversion.data.get("persistence")
    if isinstance(section, dict):
        at = conversion.origins.get("persistence", "persistence")
        for key, handler in _PERSISTENCE.items():
            if key in section:
                handler(conversion, f"{at}.{key}", section.pop(key))


def _application(conversion: Conversion, application: dict[str, Any], at: str) -> None:
    for key in ("args", "deployments"):
        if key in application and application[key] is None:
            del application[key]
    _route_prefix(conversion, application, at)
    args, kind = application.get("args"), application.get("import_path")
    if not isinstance(args, dict) or kind not in ("server", "model", "sampler", "processor"):
        return
    at = f"{at}.args"
    _take_all(conversion, args, "queue_config", f"{at}.queue_config", _QUEUE)
    if kind == "server":
        _take_all(conversion, args, "server_config", f"{at}.server_config", _SERVER)
        _gateway_args(conversion, args, at)
    if kind in ("model", "sampler"):
        _take_all(conversion, args, "adapter_config", f"{at}.adapter_config", _ADAPTER)
    if kind == "model":
        _model_args(conversion, args, at)


def _take_all(conversion: Conversion, holder: dict[str, Any], key: str, at: str, handlers: dict[str, Handler]) -> None:
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


def _route_prefix(conversion: Conversion, application: dict[str, Any], at: str) -> None:
    route, kind = application.get("route_prefix"), application.get("import_path")
    if not isinstance(route, str):
        return
    today = route
    if kind == "server" and route in ("/", "/server"):
        today = GATEWAY_PREFIX
    elif kind in ("model", "sampler") and route.startswith(f"/{kind}s/"):
        today = f"{GATEWAY_PREFIX}/{kind}/{route.removeprefix(f'/{kind}s/')}"
    if today != route:
        application["route_prefix"] = today
        conversion.became(f"{at}.route_prefix", f"{today} (it was {route})")


def _gateway_args(conversion: Conversion, args: dict[str, Any], at: str) -> None:
    repeated = {"http_options": conversion.data.get("http_options"), "route_prefix": GATEWAY_PREFIX}
    for key, same in repeated.items():
        value = args.pop(key, None)
        if value is not None and value == same:
            conversion.drop(f"{at}.{key}", "it repeats what holds anyway")
        elif value is not None:
            allowed = "the top level's http_options alone" if key == "http_options" else GATEWAY_PREFIX
            conversion.refuse(f"{at}.{key}", value, allowed)


def _model_args(conversion: Conversion, args: dict[str, Any], at: str) -> None:
    for older, limit in (("max_loras", "max_adapters_per_tenant"), ("max_length", "max_tokens_per_request")):
        value = args.pop(older, None)
        if value is not None:
            conversion.limit(f"{at}.{older}", value, limit)
    if "use_megatron" not in args:
        return
    value = args.pop("use_megatron")
    path = f"{at}.use_megatron"
    backend = "megatron" if value is True else "transformers"
    if not isinstance(value, bool):
        conversion.refuse(path, value, "true or false, or backend: megatron or transformers instead")
    elif args.get("backend", backend) != backend:
        conversion.refuse(path, value, f"backend alone, which is {args['backend']}")
    else:
        conversion.became(path, f"backend: {backend}")
    args.setdefault("backend", backend)


def _limits(conversion: Conversion) -> None:
    """Older keys that became limits. Where several mean the same one, the smallest is what held."""
    given = conversion.data.get("limits", {})
    if not isinstance(given, dict):
        return
    for name, sources in conversion.limits.items():
        # What is not a number stays for the schema to refuse, under the key that holds it.
        path, value = min(
            sources, key=lambda source: source[1] if isinstance(source[1], int | float) else float("-inf")
        )
        if name in given and given[name] != value:
            conversion.refuse(path, value, f"limits.{name} alone, which is {given[name]!r}")
            continue
        conversion.data["limits"] = given = {**given, name: value}
        conversion.origins[f"limits.{name}"] = path
        for other, theirs in sources:
            smallest = "" if theirs == value else f", the smallest given (here {theirs})"
            conversion.became(other, f"limits.{name}: {value}{smallest}")


# --- what is done with each key ---------------------------------------------------------------------------------------


def _to_limit(name: str) -> Handler:
    return lambda conversion, path, value: conversion.limit(path, value, name)


def _dropped(why: str) -> Handler:
    return lambda conversion, path, value: conversion.drop(path, why)


def _refused(allowed: str) -> Handler:
    return lambda conversion, path, value: conversion.refuse(path, value, allowed)


def _only(kept: object, why: str, allowed: str) -> Handler:
    """Dropped if the value is ``kept``, else refused."""

    def handle(conversion: Conversion, path: str, value: Any) -> None:
        if value == kept and isinstance(value, bool) == isinstance(kept, bool):
            conversion.drop(path, why)
        else:
            conversion.refuse(path, value, allowed)

    return handle


def _persistence_mode(conversion: Conversion, path: str, value: Any) -> None:
    if value in ("memory", "file"):
        conversion.became(
            path, f"SQLite (it was {value}); persistence.url names the file, data_dir/state.db by default"
        )
    else:
        conversion.refuse(path, value, "nothing: the state is SQLite, persistence.url: sqlite:///PATH names the file")


_QUEUE: dict[str, Handler] = {
    "max_input_tokens": _to_limit("max_tokens_per_request"),
    "rps_limit": _refused(_RATES),
    "tps_limit": _refused(_RATES),
    "window_seconds": _refused(_RATES),
    "token_cleanup_multiplier": _refused(_RATES),
    "token_cleanup_interval": _refused(_RATES),
    "queue_timeout": _refused("nothing (what was accepted is computed, however long it waits); remove the key"),
    "execution_timeout": _only(0, "0 meant none", "0 (nothing is stopped while it computes); remove the key"),
    "enabled": _only(True, "limits are always checked", "true (limits are always checked); raise the limits instead"),
}
_SERVER: dict[str, Handler] = {
    "per_token_model_limit": _to_limit("max_adapters_per_tenant"),
    "expiration_timeout": _to_limit("session_timeout_seconds"),
    "cleanup_interval": _dropped("expiry needs no interval"),
    "metrics_update_interval": _dropped("metrics are taken when they are asked for"),
    "actor_name": _dropped("the state is no actor"),
}
_ADAPTER: dict[str, Handler] = {
    "adapter_timeout": _to_limit("session_timeout_seconds"),
    "per_token_adapter_limit": _to_limit("max_adapters_per_tenant"),
    "adapter_max_lifetime": _refused("nothing (an adapter lives as long as its session); remove the key"),
}
_PERSISTENCE: dict[str, Handler] = {
    "mode": _persistence_mode,
    "file_path": _dropped("the state is in the SQLite file of persistence.url, data_dir/state.db by default"),
    "redis_url": _refused("nothing: the state is SQLite, persistence.url: sqlite:///PATH names the file"),
    "key_prefix": _dropped("each server has a database of its own"),
}
