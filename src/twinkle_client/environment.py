"""The one module of the client that reads environment variables.

TWINKLE_SERVER_URL    the server's address (default http://127.0.0.1:8000)
TWINKLE_SERVER_TOKEN  the API key (default EMPTY_TOKEN: a server that issues no keys accepts any token)
TWINKLE_WAIT_FOR_LIMITS  seconds to wait for a place if a limit, such as that of adapters, is full (default 0)
TWINKLE_CONNECT_DEADLINE  seconds in which a new client tries to reach a server that has never answered (default 20)

TWINKLE_SEED          the seed of shuffling dataloaders that are given none, before that of ``initialize``
LOG_LEVEL             a level of Python's logging, as a name or number, for ``initialize`` (default INFO)
WORLD_SIZE            the number of processes, as torchrun sets it; ``initialize`` refuses more than one

TWINKLE_RUN_ID        the run of a script that ``twinkle-auto`` has started (see ``twinkle_client.auto.runtime``)
TWINKLE_AUTO_RUN_ID, TWINKLE_LLM_BASE_URL, TWINKLE_LLM_MODEL, TWINKLE_LLM_API_KEY, TWINKLE_AUTO_VERBOSE
                      the options of ``twinkle-auto`` that are not given

and, for the tinker SDK, TINKER_BASE_URL and TINKER_API_KEY: see :func:`set_tinker_variables`. Proxies are taken from
the system's settings, or from HTTP_PROXY and similar variables.
"""

import logging
import os
from dataclasses import dataclass
from urllib.request import getproxies

from twinkle_client.errors import invalid

__all__ = [
    "AutoEnvironment",
    "Environment",
    "git_variables",
    "has_tls_proxy",
    "log_level",
    "processes_of_launch",
    "read_auto_environment",
    "read_environment",
    "run_id_of_launch",
    "script_variables",
    "set_tinker_variables",
    "tinker_key",
    "tinker_url",
]

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TOKEN = "EMPTY_TOKEN"
# No attempt begins after this many seconds, and an attempt takes at most 10: an error comes within 30 s.
DEFAULT_CONNECT_DEADLINE = "20"


@dataclass(frozen=True)
class Environment:
    server_url: str
    server_token: str
    wait_for_limits: str
    connect_deadline: str
    names_server: bool  # whether TWINKLE_SERVER_URL is set
    seed: int | None  # TWINKLE_SEED


def read_environment() -> Environment:
    """Read the variables now: scripts may set them after import."""
    return Environment(
        server_url=os.environ.get("TWINKLE_SERVER_URL", "").strip() or DEFAULT_URL,
        server_token=os.environ.get("TWINKLE_SERVER_TOKEN", "").strip() or DEFAULT_TOKEN,
        wait_for_limits=os.environ.get("TWINKLE_WAIT_FOR_LIMITS", "").strip() or "0",
        connect_deadline=os.environ.get("TWINKLE_CONNECT_DEADLINE", "").strip() or DEFAULT_CONNECT_DEADLINE,
        names_server=bool(os.environ.get("TWINKLE_SERVER_URL", "").strip()),
        seed=_integer("TWINKLE_SEED"),
    )


@dataclass(frozen=True)
class AutoEnvironment:
    """The options of ``twinkle-auto`` that come from variables."""

    run_id: str | None
    llm_base_url: str
    llm_model: str
    llm_api_key: str
    verbose: bool


def read_auto_environment() -> AutoEnvironment:
    verbose = os.environ.get("TWINKLE_AUTO_VERBOSE", "").strip().lower()
    return AutoEnvironment(
        run_id=os.environ.get("TWINKLE_AUTO_RUN_ID", "").strip() or None,
        llm_base_url=os.environ.get("TWINKLE_LLM_BASE_URL", "").strip() or "http://localhost:11434/v1",
        llm_model=os.environ.get("TWINKLE_LLM_MODEL", "").strip() or "qwen3.5",
        llm_api_key=os.environ.get("TWINKLE_LLM_API_KEY", "").strip(),
        verbose=verbose not in ("", "0", "false", "no", "off"),
    )


def run_id_of_launch() -> str | None:
    """Return the run that this script belongs to, if ``twinkle-auto`` has started it."""
    return os.environ.get("TWINKLE_RUN_ID", "").strip() or None


def script_variables(run_id: str, server_url: str) -> dict[str, str]:
    """Return the variables of a training script: those of this process without the key of the agent's own model."""
    own = {name: value for name, value in os.environ.items() if name != "TWINKLE_LLM_API_KEY"}
    return {**own, "TWINKLE_RUN_ID": run_id, "TWINKLE_SERVER_URL": server_url, "PYTHONUNBUFFERED": "1"}


def git_variables() -> dict[str, str]:
    """Return the variables of a git that asks nobody: a repository that wants a password is an error."""
    return {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "SSH_ASKPASS": "", "GCM_INTERACTIVE": "never"}


def processes_of_launch() -> int:
    """Return the number of processes that a launcher such as torchrun has started; 1 without one."""
    return max(1, _integer("WORLD_SIZE") or 1)


def log_level() -> int:
    value = os.environ.get("LOG_LEVEL", "").strip().upper() or "INFO"
    if value.isascii() and value.isdecimal():
        return int(value)
    levels = logging.getLevelNamesMapping()
    if value not in levels:
        raise invalid("LOG_LEVEL", value, f"a number or one of {', '.join(levels)}")
    return levels[value]


def _integer(name: str) -> int | None:
    value = os.environ.get(name, "").strip()
    try:
        return int(value) if value else None
    except ValueError:
        raise invalid(name, value, "an integer") from None


def has_tls_proxy() -> bool:
    """Return whether a proxy is configured whose own address is https, so that requests to any server may need TLS."""
    return any(address.lower().startswith("https:") for address in getproxies().values())


def set_tinker_variables(base_url: str | None, api_key: str | None) -> None:
    """Set the variables that the tinker SDK reads. The SDK appends /api/v1 to the address itself."""
    url = base_url or os.environ.get("TWINKLE_SERVER_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_URL
    os.environ["TINKER_BASE_URL"] = url.rstrip("/").removesuffix("/api/v1")
    key = api_key or os.environ.get("TWINKLE_SERVER_TOKEN") or os.environ.get("TINKER_API_KEY") or DEFAULT_TOKEN
    os.environ["TINKER_API_KEY"] = key


def tinker_url() -> str:
    """Return the address in TINKER_BASE_URL, which :func:`set_tinker_variables` sets, else the default address."""
    return os.environ.get("TINKER_BASE_URL") or DEFAULT_URL


def tinker_key() -> str:
    """Return the key in TINKER_API_KEY, which :func:`set_tinker_variables` sets, else the default token."""
    return os.environ.get("TINKER_API_KEY") or DEFAULT_TOKEN
