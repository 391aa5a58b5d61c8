"""Keys of the older form of the configuration: each becomes a key of today's, is dropped with a note, or is refused.

Works on plain mappings before they are validated; values of the wrong type are passed on for the schema to refuse.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from twinkle.server.config.conversion import Conversion, Handler, dropped, refused, take_all, to_limit
from twinkle.server.config.older_queue import convert_queue
from twinkle.server.config.problems import path_of
from twinkle.server.config.serving import GATEWAY_PREFIX

__all__ = ["OLDER_KEYS", "convert"]

# What became of each older key, for people: the table of the reference page, and checked by a test. ARGS stands for
# applications[].args.
OLDER_KEYS: dict[str, str] = {
    "server_type": "dropped: one server speaks both protocols",
    "telemetry_config": "`telemetry`",
    "persistence_config": "`persistence`",
    "persistence.mode": "memory and file: SQLite (`persistence.url`); redis: refused, it is SQLite or PostgreSQL",
    "persistence.file_path": "dropped: the state is in `persistence.url`",
    "persistence.redis_url": "refused: use `persistence.url`",
    "persistence.key_prefix": "dropped: each server has a database of its own",
    "task_queue, ARGS.queue_config": "the rows below; the table itself is gone",
    "….max_input_tokens": "`limits.max_tokens_per_request`; of a sampler dropped: the model's context is the limit",
    "….tps_limit, ….window_seconds": "model: `limits.max_training_tokens_per_minute`; sampler: "
    "`limits.max_sampling_tokens_per_minute`; `task_queue`: both",
    "….rps_limit": "dropped: requests are not counted by time; tokens a minute and what may wait are limited",
    "….token_cleanup_multiplier, ….token_cleanup_interval": "dropped: what was counted needs no sweeping",
    "….queue_timeout": "300 and more: dropped; less: refused, what was accepted is computed, however long it waits",
    "….execution_timeout": "0, 120 and more: dropped; else refused, nothing is stopped while it computes",
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
    "ARGS.adapter_config.adapter_max_lifetime": "dropped: an adapter lives as long as its session",
    "applications[].deployments[1:]": "dropped: the first entry is the application's",
}

_DATABASES = "the state is in SQLite or PostgreSQL: persistence.url is sqlite:///PATH or postgresql://…"


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
    convert_queue(conversion, data, "task_queue", "task_queue", "task_queue")


def _persistence(conversion: Conversion) -> None:
    section = conversion.data.get("persistence")
    if isinstance(section, dict):
        at = conversion.origins.get("persistence", "persistence")
        for key, handler in _PERSISTENCE.items():
            value = section.pop(key, None)
            if value is not None:
                handler(conversion, f"{at}.{key}", value)


def _application(conversion: Conversion, application: dict[str, Any], at: str) -> None:
    for key in ("args", "deployments"):
        if key in application and application[key] is None:
            del application[key]
    _route_prefix(conversion, application, at)
    _deployments(conversion, application, at)
    args, kind = application.get("args"), application.get("import_path")
    if not isinstance(args, dict) or kind not in ("server", "model", "sampler", "processor"):
        return
    at = f"{at}.args"
    convert_queue(conversion, args, "queue_config", f"{at}.queue_config", kind)
    if kind == "server":
        take_all(conversion, args, "server_config", f"{at}.server_config", _SERVER)
        _gateway_args(conversion, args, at)
    if kind in ("model", "sampler"):
        take_all(conversion, args, "adapter_config", f"{at}.adapter_config", _ADAPTER)
    if kind == "model":
        _model_args(conversion, args, at)


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


def _deployments(conversion: Conversion, application: dict[str, Any], at: str) -> None:
    """A list, of which the first entry alone ever counted."""
    given = application.get("deployments")
    if isinstance(given, list) and len(given) > 1:
        application["deployments"] = given[:1]
        conversion.drop(f"{at}.deployments[1:]", "an application is one deployment: the first entry holds")


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


def _persistence_mode(conversion: Conversion, path: str, value: Any) -> None:
    if value in ("memory", "file"):
        conversion.became(
            path, f"SQLite (it was {value}); persistence.url names the file, data_dir/state.db by default"
        )
    else:
        conversion.refuse(path, value, f"memory or file; {_DATABASES}")


_SERVER: dict[str, Handler] = {
    "per_token_model_limit": to_limit("max_adapters_per_tenant"),
    "expiration_timeout": to_limit("session_timeout_seconds"),
    "cleanup_interval": dropped("expiry needs no interval"),
    "metrics_update_interval": dropped("metrics are taken when they are asked for"),
    "actor_name": dropped("the state is no actor"),
}
_ADAPTER: dict[str, Handler] = {
    "adapter_timeout": to_limit("session_timeout_seconds"),
    "per_token_adapter_limit": to_limit("max_adapters_per_tenant"),
    "adapter_max_lifetime": dropped("an adapter lives as long as its session"),
}
_PERSISTENCE: dict[str, Handler] = {
    "mode": _persistence_mode,
    "file_path": dropped("the state is in the SQLite file of persistence.url, data_dir/state.db by default"),
    "redis_url": refused(f"nothing: {_DATABASES}"),
    "key_prefix": dropped("each server has a database of its own"),
}
