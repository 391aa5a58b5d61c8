"""The one module of the package ``twinkle`` that reads environment variables. Those that users set:

TWINKLE_CACHE_DIR          the cache of downloaded and converted models (default ``~/.cache/twinkle``)
TWINKLE_OFFLINE            1/true/yes/on: models are not downloaded; one that is not in a cache is an error
TWINKLE_FORBID_HF          a switch like TWINKLE_OFFLINE: nothing is downloaded from or uploaded to Hugging Face
TWINKLE_TRUST_REMOTE_CODE  a switch: plugins and functions from outside may run in this process (default: off)
TWINKLE_MODEL_ID_ALIASES   a JSON object that maps other names of models to their ids
TWINKLE_SEED               the seed of components that are given none
TWINKLE_FULL_DETERMINISM   a switch: the same as ``initialize(full_determinism=True)``
TWINKLE_MODE               local or ray: the mode if ``initialize`` is given none (default local)
TWINKLE_NAME               the program's name if ``initialize`` is given none
TWINKLE_NOTIFIER           a notifier's ``to_dict()`` as a JSON object, used if ``initialize`` is given no notifier
TWINKLE_FAIL_FAST          a switch, on by default; off: a loss of TransformersModel that raises is logged, counts as 0,
                           and training goes on; for unattended runs of many processes
TWINKLE_DIST_TIMEOUT_SECONDS  how long training processes wait for each other, a number > 0 (default 7200)
TWINKLE_SYNC_BUCKET_MB     how many MiB of weights ``sync_weights`` sends at a time, a number > 0 (default 512)
LOG_LEVEL                  a level of Python's logging, as a name or number (default INFO)
TWINKLE_SESSION_ID         identifies the launch that a process belongs to (default: the id of its parent process)
TWINKLE_CPU_PG_CPUS_PER_PROC  Ray CPUs that a worker of a CPU group reserves, a number > 0 (default 1)
TWINKLE_SERVER_CONFIG      the option -c of ``twinkle-server``, if it is not given
TWINKLE_RAY_NAMESPACE      the option --namespace of ``twinkle-server``, if it is not given
TWINKLE_PRINT_FORMAT       the option --format of ``twinkle-server print-config``: yaml (default) or json
TWINKLE_DEFAULT_SAVE_DIR   the server's ``data_dir`` if the configuration has none
TWINKLE_PER_USER_PROCESSOR_LIMIT  ``limits.max_processors_per_tenant`` if the configuration has none
TWINKLE_LONG_POLL_TIMEOUT  ``clients.long_poll_seconds`` if the configuration has none
TWINKLE_CHECK_THREADS      a switch, for tests: methods of the server assert that they run in the thread they belong to
RAY_ADDRESS                the Ray cluster to use, as Ray reads it (local: start a new one)
RAY_AUTH_MODE              token or disabled, as Ray reads it; Twinkle sets it if it is not set (see docs/ray.md)
RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH  the token of a Ray cluster or the file that holds it, as Ray reads them
RAY_TMPDIR                 the directory in whose subdirectory ``ray`` Ray keeps its sessions (default /tmp)
LOCAL_RANK                 this process's number on its machine, as torchrun sets it
RANK, WORLD_SIZE           its number among all processes, and the number of processes; torchrun also sets
                           LOCAL_WORLD_SIZE, NNODES and NODE_RANK; some launchers set −1 for "not distributed"
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from twinkle.errors import InvalidInputError

__all__ = [
    "Environment",
    "Launch",
    "Mode",
    "RayVariables",
    "ServerVariables",
    "checks_threads",
    "hides_devices",
    "listed_devices",
    "read_environment",
    "read_launch",
    "read_ray_variables",
    "read_server_variables",
    "set_among",
    "set_variable_defaults",
    "set_variables",
    "twinkle_variables",
    "variables_with_own_caches",
]

Mode = Literal["local", "ray"]

_SWITCH = {"": False, "0": False, "false": False, "no": False, "off": False}
_SWITCH |= {"1": True, "true": True, "yes": True, "on": True}


@dataclass(frozen=True)
class Environment:
    """The settings of this process that come from environment variables."""

    cache_dir: Path
    offline: bool
    forbid_hf: bool
    trust_remote_code: bool
    model_id_aliases: Mapping[str, str]
    seed: int | None
    full_determinism: bool
    mode: Mode
    name: str | None
    notifier: Mapping[str, Any] | None
    fail_fast: bool
    dist_timeout_seconds: float
    log_level: int
    local_rank: int
    session_id: str
    cpus_per_process: float
    sync_bucket_mb: float


@dataclass(frozen=True)
class Launch:
    """This process's place among those of a launcher (torchrun, Ray worker groups). ``rank`` −1: no launcher."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    nodes: int
    node_rank: int


@dataclass(frozen=True)
class RayVariables:
    """The variables that Ray reads about its cluster and its token.

    None: not set. ``token_path`` and ``directory`` have Ray's defaults if their variables are not set.
    """

    address: str | None
    auth_mode: str | None
    token: str | None
    token_path: Path
    directory: Path  # where Ray keeps all its sessions on this machine


@dataclass(frozen=True)
class ServerVariables:
    """The variables that ``twinkle-server`` reads; None: not set.

    Command line options override ``config``, ``ray_namespace`` and ``print_format``; keys of the configuration override
    the others.
    """

    config: Path | None
    ray_namespace: str | None
    print_format: str  # yaml or json
    save_dir: str | None
    processor_limit: int | None
    long_poll_seconds: float | None


def read_environment() -> Environment:
    """Read the variables now: they are cheap to read, and tests and launchers may set them after import."""
    cache_dir = os.environ.get("TWINKLE_CACHE_DIR") or "~/.cache/twinkle"
    return Environment(
        cache_dir=Path(cache_dir).expanduser().absolute(),
        offline=_switch("TWINKLE_OFFLINE"),
        forbid_hf=_switch("TWINKLE_FORBID_HF"),
        trust_remote_code=_switch("TWINKLE_TRUST_REMOTE_CODE"),
        model_id_aliases=_aliases(),
        seed=_integer("TWINKLE_SEED"),
        full_determinism=_switch("TWINKLE_FULL_DETERMINISM"),
        mode=_mode(),
        name=os.environ.get("TWINKLE_NAME") or None,
        notifier=_notifier(),
        fail_fast=_switch("TWINKLE_FAIL_FAST", "1"),
        dist_timeout_seconds=_positive("TWINKLE_DIST_TIMEOUT_SECONDS", 7200.0),
        log_level=_log_level(),
        local_rank=max(0, _integer("LOCAL_RANK") or 0),  # some launchers set −1 for "not distributed"
        session_id=os.environ.get("TWINKLE_SESSION_ID") or str(os.getppid()),
        cpus_per_process=_positive("TWINKLE_CPU_PG_CPUS_PER_PROC", 1.0),
        sync_bucket_mb=_positive("TWINKLE_SYNC_BUCKET_MB", 512.0),
    )


def read_launch() -> Launch:
    rank, local_rank = _integer("RANK"), _integer("LOCAL_RANK")
    return Launch(
        rank=-1 if rank is None else rank,
        local_rank=-1 if local_rank is None else local_rank,
        world_size=max(1, _integer("WORLD_SIZE") or 1),
        local_world_size=max(1, _integer("LOCAL_WORLD_SIZE") or 1),
        nodes=max(1, _integer("NNODES") or 1),
        node_rank=max(0, _integer("NODE_RANK") or 0),
    )


def read_ray_variables() -> RayVariables:
    return RayVariables(
        address=_text("RAY_ADDRESS"),
        auth_mode=_text("RAY_AUTH_MODE"),
        token=_text("RAY_AUTH_TOKEN"),
        token_path=Path(_text("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser(),
        directory=Path(_text("RAY_TMPDIR") or "/tmp") / "ray",
    )


def read_server_variables() -> ServerVariables:
    config, print_format = _text("TWINKLE_SERVER_CONFIG"), _text("TWINKLE_PRINT_FORMAT") or "yaml"
    if print_format not in ("yaml", "json"):
        raise InvalidInputError("TWINKLE_PRINT_FORMAT", print_format, "yaml or json, as for --format")
    limit = _integer("TWINKLE_PER_USER_PROCESSOR_LIMIT")
    if limit is not None and limit < 1:
        raise InvalidInputError("TWINKLE_PER_USER_PROCESSOR_LIMIT", limit, "an integer ≥ 1")
    seconds = "TWINKLE_LONG_POLL_TIMEOUT"
    return ServerVariables(
        config=None if config is None else Path(config),
        ray_namespace=_text("TWINKLE_RAY_NAMESPACE"),
        print_format=print_format,
        save_dir=_text("TWINKLE_DEFAULT_SAVE_DIR"),
        processor_limit=limit,
        long_poll_seconds=None if _text(seconds) is None else _positive(seconds, 1.0),
    )


def checks_threads() -> bool:
    """Return whether methods that belong to one thread of a server assert that they run there."""
    return _switch("TWINKLE_CHECK_THREADS")


def hides_devices(visible_variable: str) -> bool:
    """Return whether a variable like CUDA_VISIBLE_DEVICES is set and names no device."""
    return os.environ.get(visible_variable, "unset").strip() in ("", "-1")


def listed_devices(visible_variable: str) -> tuple[str, ...] | None:
    """Return the devices that a variable like CUDA_VISIBLE_DEVICES names; None if it is not set."""
    value = os.environ.get(visible_variable)
    return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())


def set_among(names: Iterable[str]) -> list[str]:
    """Return those of the names that are variables of this process with a value."""
    return [name for name in names if os.environ.get(name)]


def twinkle_variables() -> dict[str, str]:
    """Return the TWINKLE_… variables of this process, to pass them to worker processes."""
    return {name: value for name, value in os.environ.items() if name.startswith("TWINKLE_")}


def variables_with_own_caches(directory: Path) -> dict[str, str]:
    """Return the variables for a process whose download caches and temporary files are in a directory of its own.

    When offline, nothing is downloaded; then the process uses the caches of this machine.
    """
    variables = {**os.environ, "TMPDIR": str(directory)}
    if not _switch("TWINKLE_OFFLINE") and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
        caches = {
            "HF_HUB_CACHE": "hub",
            "HF_XET_CACHE": "xet",
            "HF_DATASETS_CACHE": "datasets",
            "MODELSCOPE_CACHE": "ms",
        }
        variables |= {name: str(directory / folder) for name, folder in caches.items()}
    return variables


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables in a worker process, as the program that started it says."""
    os.environ.update(variables)


def set_variable_defaults(defaults: Mapping[str, str]) -> None:
    """Set variables for a library that can only be configured by variables; those that are set already stay."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _switch(name: str, default: str = "") -> bool:
    value = os.environ.get(name, default).strip().lower() or default
    if value not in _SWITCH:
        raise InvalidInputError(name, value, "1, true, yes, on or 0, false, no, off")
    return _SWITCH[value]


def _text(name: str) -> str | None:
    """Return the value of a variable; None if it is not set or empty."""
    return os.environ.get(name, "").strip() or None


def _integer(name: str) -> int | None:
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    try:
        return int(value)
    except ValueError as error:
        raise InvalidInputError(name, value, "an integer") from error


def _positive(name: str, default: float) -> float:
    value = os.environ.get(name, "").strip()
    try:
        number = float(value) if value else default
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise InvalidInputError(name, value, "a number > 0")
    return number


def _log_level() -> int:
    value = os.environ.get("LOG_LEVEL", "").strip().upper() or "INFO"
    if value.isascii() and value.isdecimal():
        return int(value)
    levels = logging.getLevelNamesMapping()
    if value not in levels:
        raise InvalidInputError("LOG_LEVEL", value, f"a number or one of {', '.join(levels)}")
    return levels[value]


def _mode() -> Mode:
    value = os.environ.get("TWINKLE_MODE", "").strip().lower() or "local"
    if value not in ("local", "ray"):
        raise InvalidInputError("TWINKLE_MODE", value, "local or ray")
    return cast("Mode", value)


def _notifier() -> dict[str, Any] | None:
    text = os.environ.get("TWINKLE_NOTIFIER", "").strip()
    if not text:
        return None
    allowed = "a JSON object: what a notifier's to_dict() returns"  # the text itself may hold a secret
    try:
        described = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError("TWINKLE_NOTIFIER", "no JSON", allowed) from error
    if not isinstance(described, dict):
        raise InvalidInputError("TWINKLE_NOTIFIER", f"a JSON {type(described).__name__}", allowed)
    return described


def _aliases() -> dict[str, str]:
    name = "TWINKLE_MODEL_ID_ALIASES"
    text = os.environ.get(name, "").strip()
    allowed = "a JSON object of strings: alias to model id"
    try:
        aliases = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidInputError(name, text, allowed) from error
    if not isinstance(aliases, dict) or not all(isinstance(value, str) for value in aliases.values()):
        raise InvalidInputError(name, text, allowed)
    return aliases
