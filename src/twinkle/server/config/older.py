"""Import the older form of the configuration: each older key becomes one of today's, is dropped with a note, or is
refused.

This works on plain mappings before they are validated. A value of the wrong type is passed on for the schema to refuse;
``Conversion.origins`` remembers the older key that holds it in the file. No other module knows the older form.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import ConfigProblem
from twinkle.server.config.applications import GATEWAY_PREFIX, PROCESSOR_PREFIX
from twinkle.server.config.messages import path_of, problem, unknown_key


@dataclass
class Conversion:
    """The mapping in today's form, with the notes and problems of its conversion."""

    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigProblem] = field(default_factory=list)
    # limit → (older key, value); several older keys may mean the same limit
    limits: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # today's path → the path in the file

    def at_older_key(self, found: ConfigProblem) -> ConfigProblem:
        """Return the same problem under the key that is in the file."""
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


@dataclass(frozen=True)
class OlderKey:
    """What becomes of an older key: ``words`` for the reference page, and the function that converts its value."""

    words: str
    convert: Callable[[Conversion, str, Any], None]  # the path in the file, and the value


# --- kinds of conversion ----------------------------------------------------------------------------------------------


def _to_limit(name: str) -> OlderKey:
    return OlderKey(f"`limits.{name}`", lambda conversion, path, value: conversion.limit(path, value, name))


def _dropped(why: str) -> OlderKey:
    return OlderKey(f"dropped: {why}", lambda conversion, path, value: conversion.drop(path, why))


def _dropped_if(accepted: Callable[[Any], bool], words: str, why: str, instead: str = "remove the key") -> OlderKey:
    """Return a key whose value is dropped if it is ``accepted``, because the server does that anyway, else refused.

    ``words`` name the accepted values, ``why`` says why no key is needed, ``instead`` what to do after a refusal.
    """

    def convert(conversion: Conversion, path: str, value: Any) -> None:
        if accepted(value):
            conversion.drop(path, why)
        else:
            conversion.refuse(path, value, f"{words} ({why}); {instead}")

    return OlderKey(f"{words}: dropped; else refused: {why}", convert)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _persistence_mode(conversion: Conversion, path: str, value: Any) -> None:
    if value in ("memory", "file", "redis"):
        what = f"SQLite (it was {value}); persistence.url names the file, data_dir/state.db by default"
        if value == "redis":
            what += ". It works on one machine; several need persistence.url: postgresql://…"
        conversion.became(path, what)
    else:
        conversion.refuse(path, value, f"memory, file or redis; {_DATABASES}")


def _rate(limits: tuple[str, ...], window: object) -> OlderKey:
    """Return the key ``tps_limit``, whose value is a number of tokens in ``window`` seconds (1 if that is no number).

    It becomes the limits called ``limits``, in tokens a minute.
    """
    seconds = window if isinstance(window, int | float) and window > 0 else _WINDOW_SECONDS

    def convert(conversion: Conversion, path: str, value: Any) -> None:
        a_minute = value * 60 / seconds if _is_number(value) else -1
        if not math.isfinite(a_minute) or a_minute < 0:
            conversion.refuse(path, value, "a number ≥ 0")
        elif value == 0:
            conversion.drop(path, "0 meant no limit")
        else:
            for name in limits:
                conversion.limit(path, max(1, round(a_minute)), name)

    return OlderKey(" and ".join(f"`limits.{name}`" for name in limits), convert)


# --- the older sections -----------------------------------------------------------------------------------------------

_DATABASES = "the state is in SQLite or PostgreSQL: persistence.url is sqlite:///PATH or postgresql://…"
_BOTH_PROTOCOLS = _dropped_if(
    lambda value: value in ("tinker", "twinkle"), "tinker or twinkle", "one server speaks both protocols"
)
_PERSISTENCE: dict[str, OlderKey] = {
    "mode": OlderKey("SQLite (`persistence.url`), on one machine; several machines need PostgreSQL", _persistence_mode),
    "file_path": _dropped("the state is in the SQLite file of persistence.url, data_dir/state.db by default"),
    "redis_url": _dropped("the server does not use Redis; the state is in the database of persistence.url"),
    "key_prefix": _dropped("each server has a database of its own"),
}
_SERVER: dict[str, OlderKey] = {
    "per_token_model_limit": _to_limit("max_adapters_per_tenant"),
    "expiration_timeout": _to_limit("session_timeout_seconds"),
    "cleanup_interval": _dropped("the server looks for expired sessions every 15 s"),
    "metrics_update_interval": _dropped("metrics are collected when they are read"),
    "actor_name": _dropped("the state is not an actor"),
}
_ADAPTER: dict[str, OlderKey] = {
    "adapter_timeout": _to_limit("session_timeout_seconds"),
    "per_token_adapter_limit": _to_limit("max_adapters_per_tenant"),
    "adapter_max_lifetime": _to_limit("adapter_max_lifetime_seconds"),
}
_MODEL: dict[str, OlderKey] = {
    "max_loras": _to_limit("max_adapters_per_tenant"),
    "max_length": _to_limit("max_tokens_per_request"),
}
# The rates of a queue became limits in tokens a minute for each tenant. These applications had a queue; `task_queue`
# was for all of them.
_RATES = {
    "model": ("max_training_tokens_per_minute",),
    "sampler": ("max_sampling_tokens_per_minute",),
    "task_queue": ("max_training_tokens_per_minute", "max_sampling_tokens_per_minute"),
}
_WINDOW_SECONDS = 1.0  # the default of the older form
_NO_QUEUE = _dropped("this application has no queue")
_QUEUE: dict[str, OlderKey] = {
    "max_input_tokens": _to_limit("max_tokens_per_request"),
    "tps_limit": _NO_QUEUE,  # replaced in :func:`_queue`: it depends on the application
    "window_seconds": _dropped_if(
        lambda value: _is_number(value) and 0 < value < math.inf,
        "a number > 0",
        "tps_limit is converted with it to tokens a minute",
    ),
    "rps_limit": _dropped("requests by time are not limited; tokens a minute and waiting requests are"),
    "token_cleanup_multiplier": _dropped("the server removes unused counters by itself"),
    "token_cleanup_interval": _dropped("the server removes unused counters by itself"),
    "queue_timeout": _dropped_if(
        lambda value: _is_number(value) and value >= 300,
        "300 or more",
        "accepted requests are computed, however long they wait",
    ),
    "execution_timeout": _dropped_if(
        lambda value: _is_number(value) and (value == 0 or value >= 120),
        "0, or 120 or more",
        "nothing is stopped while it computes",
    ),
    "enabled": _dropped_if(
        lambda value: value is True, "true", "limits are always checked", "raise the limits instead"
    ),
}


_NO_ADAPTERS = _dropped("it has no effect with train_mode: full, which has no adapters")
_OF_ADAPTERS = ("max_loras", "max_r", "target_modules", "lora_config")
_MODEL_FULL: dict[str, OlderKey] = {
    **dict.fromkeys(_OF_ADAPTERS, _NO_ADAPTERS),
    "max_length": _MODEL["max_length"],
}


def older_keys() -> dict[str, str]:
    """Return what becomes of each older key, for the reference page. ARGS stands for applications[].args."""
    model, sampler = (_rate(_RATES[kind], None).words for kind in ("model", "sampler"))
    queue = {key: one.words for key, one in _QUEUE.items()} | {
        "max_input_tokens": "`limits.max_tokens_per_request`; sampler: dropped, the model's context is the limit",
        "tps_limit": f"model: {model}; sampler: {sampler}; `task_queue`: both",
    }
    return {
        "server_type": _BOTH_PROTOCOLS.words,
        "telemetry_config": "`telemetry`",
        "persistence_config": "`persistence`",
        **{f"persistence.{key}": one.words for key, one in _PERSISTENCE.items()},
        "task_queue, ARGS.queue_config": "see the next rows; the section itself is gone",
        **{f"….{key}": words for key, words in queue.items()},
        "applications[].route_prefix": "server: `/server` and `/` become `/api/v1`; `/models/NAME` becomes "
        "`/api/v1/model/NAME`, `/samplers/NAME` becomes `/api/v1/sampler/NAME`, `/processors` becomes "
        "`/api/v1/processor`; requests to the older paths are answered, too",
        "applications[].deployments[1:]": "dropped: an application is one deployment, its first entry",
        **{f"ARGS.server_config.{key}": one.words for key, one in _SERVER.items()},
        "ARGS.http_options, ARGS.route_prefix": "dropped if they are the same as the top level's `http_options` and as "
        "`/api/v1`; else refused",
        "ARGS.use_megatron": "false: `backend: transformers`; true: `backend: megatron`",
        **{f"ARGS.{key}": one.words for key, one in _MODEL.items()},
        ", ".join(f"ARGS.{key}" for key in _OF_ADAPTERS): f"with `train_mode: full`: {_NO_ADAPTERS.words}",
        **{f"ARGS.adapter_config.{key}": one.words for key, one in _ADAPTER.items()},
    }


# --- conversion -------------------------------------------------------------------------------------------------------


def convert(data: Mapping[str, Any]) -> Conversion:
    """Return ``data`` in today's form. The argument is left as it is."""
    conversion = Conversion(deepcopy(dict(data)))
    _top_level(conversion)
    applications = conversion.data.get("applications")
    if isinstance(applications, list):
        for index, application in enumerate(applications):
            if isinstance(application, dict):
                _application(conversion, application, path_of(("applications", index)))
    _limits(conversion)
    return conversion


def _top_level(conversion: Conversion) -> None:
    data = conversion.data
    for older, today in (("telemetry_config", "telemetry"), ("persistence_config", "persistence")):
        if older in data and today in data:
            conversion.refuse(older, data.pop(older), f"{today} alone, which is there too")
        elif older in data:
            data[today] = data.pop(older) or {}
            conversion.origins[today] = older
            conversion.became(older, today)
    _take(conversion, data, "", {"server_type": _BOTH_PROTOCOLS})
    if data.get("applications") and "runtime" not in data:
        data["runtime"] = "ray"
        conversion.notes.append(
            "runtime: not given, ray is used, as for files with applications but no runtime; embedded is one process"
        )
    _queue(conversion, data, "task_queue", "task_queue", "task_queue")
    if isinstance(data.get("persistence"), dict):
        at = conversion.origins.get("persistence", "persistence")
        _take(conversion, data["persistence"], f"{at}.", _PERSISTENCE)


def _take(conversion: Conversion, holder: dict[str, Any], prefix: str, keys: Mapping[str, OlderKey]) -> None:
    """Take these keys out of ``holder`` and convert them. A key that is null counts as not given."""
    for key, older in keys.items():
        value = holder.pop(key, None)
        if value is not None:
            older.convert(conversion, f"{prefix}{key}", value)


def _take_section(
    conversion: Conversion, holder: dict[str, Any], key: str, at: str, keys: Mapping[str, OlderKey]
) -> None:
    """Take the section ``key`` out of ``holder`` and convert its keys in order; unknown keys become problems.

    ``at``: the path of the section in the file.
    """
    section = holder.pop(key, None)
    if section is not None and not isinstance(section, dict):
        conversion.refuse(at, section, f"a section with the keys {', '.join(keys)}")
        return
    for name, value in (section or {}).items():
        if name not in keys:
            conversion.problems.append(unknown_key(f"{at}.{name}", value, list(keys)))
        elif value is not None:
            keys[name].convert(conversion, f"{at}.{name}", value)


def _queue(conversion: Conversion, holder: dict[str, Any], key: str, at: str, kind: str) -> None:
    """Take the section of a queue out of ``holder``. ``kind``: that of the application, or task_queue for all."""
    if kind not in _RATES:
        _take_section(conversion, holder, key, at, dict.fromkeys(_QUEUE, _NO_QUEUE))
        return
    section = holder.get(key)
    window = section.get("window_seconds") if isinstance(section, dict) else None
    keys = {**_QUEUE, "tps_limit": _rate(_RATES[kind], window)}
    if kind == "sampler":
        keys["max_input_tokens"] = _dropped("a prompt may be as long as the model's context")
    _take_section(conversion, holder, key, at, keys)


def _application(conversion: Conversion, application: dict[str, Any], at: str) -> None:
    for key in ("args", "deployments"):
        if key in application and application[key] is None:
            del application[key]
    _route_prefix(conversion, application, at)
    deployments = application.get("deployments")
    if isinstance(deployments, list) and len(deployments) > 1:
        application["deployments"] = deployments[:1]
        conversion.drop(f"{at}.deployments[1:]", "an application is one deployment: the first entry holds")
    args, kind = application.get("args"), application.get("import_path")
    if not isinstance(args, dict) or kind not in ("server", "model", "sampler", "processor"):
        return
    at = f"{at}.args"
    _queue(conversion, args, "queue_config", f"{at}.queue_config", kind)
    if kind == "server":
        _take_section(conversion, args, "server_config", f"{at}.server_config", _SERVER)
        _repeated(conversion, args, at)
    if kind in ("model", "sampler"):
        _take_section(conversion, args, "adapter_config", f"{at}.adapter_config", _ADAPTER)
    if kind == "model":
        _take(conversion, args, f"{at}.", _MODEL_FULL if args.get("train_mode") == "full" else _MODEL)
        _use_megatron(conversion, args, f"{at}.use_megatron")


def _route_prefix(conversion: Conversion, application: dict[str, Any], at: str) -> None:
    route, kind = application.get("route_prefix"), application.get("import_path")
    if not isinstance(route, str):
        return
    today = route
    if kind == "server" and route in ("/", "/server"):
        today = GATEWAY_PREFIX
    elif kind == "processor" and route == "/processors":
        today = PROCESSOR_PREFIX
    elif kind in ("model", "sampler") and route.startswith(f"/{kind}s/"):
        today = f"{GATEWAY_PREFIX}/{kind}/{route.removeprefix(f'/{kind}s/')}"
    if today != route:
        application["route_prefix"] = today
        conversion.became(f"{at}.route_prefix", f"{today} (it was {route})")


def _repeated(conversion: Conversion, args: dict[str, Any], at: str) -> None:
    """Drop arguments of the gateway that repeat another setting; refuse them if they differ from it."""
    repeated = {
        "http_options": (conversion.data.get("http_options"), "the top level's http_options alone"),
        "route_prefix": (GATEWAY_PREFIX, GATEWAY_PREFIX),
    }
    for key, (same, allowed) in repeated.items():
        value = args.pop(key, None)
        if value is not None and value == same:
            conversion.drop(f"{at}.{key}", "it repeats what holds anyway")
        elif value is not None:
            conversion.refuse(f"{at}.{key}", value, allowed)


def _use_megatron(conversion: Conversion, args: dict[str, Any], path: str) -> None:
    if "use_megatron" not in args:
        return
    value = args.pop("use_megatron")
    backend = "megatron" if value is True else "transformers"
    if not isinstance(value, bool):
        conversion.refuse(path, value, "true or false, or backend: megatron or transformers instead")
    elif args.get("backend", backend) != backend:
        conversion.refuse(path, value, f"backend alone, which is {args['backend']}")
    else:
        conversion.became(path, f"backend: {backend}")
    args.setdefault("backend", backend)


def _limits(conversion: Conversion) -> None:
    """Add the limits that older keys became. If several keys mean the same limit, the smallest counts, as before.

    A limit that the file also gives in today's form, with another value, is refused.
    """
    given = conversion.data.get("limits", {})
    if not isinstance(given, dict):
        return
    for name, sources in conversion.limits.items():
        # A value that is not a number is kept, for the schema to refuse under its older key.
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
