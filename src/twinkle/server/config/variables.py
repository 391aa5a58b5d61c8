"""Environment variables of a server: those that stand for a key which the file leaves out, and those that do nothing.

Who moves here from a server that knew more of them is told, once, what became of each that is set.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.environment import read_server_variables, twinkle_variables
from twinkle.server.config.sections import ClientsConfig

__all__ = ["NO_EFFECT", "apply_variables", "notes_on_application"]

_OFF = ("0", "false", "no", "off")
# Name, or beginning of the name, and why it does nothing here.
NO_EFFECT: dict[str, str] = {
    "TWINKLE_POLL_INTERVAL": "whoever waits for a result is woken by it",
    "TWINKLE_TOKEN_SALT": "tenants are kept apart by ids of their own, under the secret in data_dir",
    "TWINKLE_FAIL_FAST": "a request that fails is always answered with its error",
    "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV": "CUDA_VISIBLE_DEVICES holds for the embedded runtime, Ray's choice on Ray",
    "TWINKLE_PERSISTENCE_": "persistence.url says where the state is",
    "TWINKLE_TELEMETRY_": "the section telemetry says what is exported",
}
# Read where the server is launched: no use in the environment of one application.
_OF_THE_LAUNCH: dict[str, str] = {
    "TWINKLE_DEFAULT_SAVE_DIR": "data_dir",
    "TWINKLE_PER_USER_PROCESSOR_LIMIT": "limits.max_processors_per_tenant",
    "TWINKLE_LONG_POLL_TIMEOUT": "clients.long_poll_seconds",
    "TWINKLE_RAY_NAMESPACE": "ray_namespace",
}
_WHAT_HOLDS_ANYWAY = ("TWINKLE_FAIL_FAST", "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV")  # unless they are switched off


@dataclass(frozen=True)
class _Stand:
    """A variable in the place of a key: ``section`` is empty at the top level."""

    name: str
    section: str
    key: str
    value: object

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}".removeprefix(".")


def apply_variables(data: dict[str, Any]) -> list[str]:
    """Put into ``data`` what variables of this process say and ``data`` does not; notes on all that are set."""
    notes = [f"{name}: has no effect, {why}" for name, why in _idle(twinkle_variables())]
    for stand in _stands():
        holder = data.setdefault(stand.section, {}) if stand.section else data
        if holder is None:  # a heading with nothing under it
            holder = data[stand.section] = {}
        if not isinstance(holder, dict) or stand.key in holder:
            notes.append(f"{stand.name}: has no effect where {stand.path} is given")
            continue
        holder[stand.key] = stand.value
        notes.append(f"{stand.name}: became {stand.path}: {stand.value}")
    return notes


def notes_on_application(variables: Mapping[str, str], at: str) -> list[str]:
    """Of the variables of one application, those that do nothing there. ``at``: where they are in the configuration."""
    idle = [*_idle(variables), *((name, f"{key} is the key for it") for name, key in _OF_THE_LAUNCH.items())]
    return [f"{at}.{name}: has no effect, {why}" for name, why in idle if name in variables]


def _idle(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names, and why they do nothing."""
    for name, value in variables.items():
        for known, why in NO_EFFECT.items():
            matches = name.startswith(known) if known.endswith("_") else name == known
            holds_anyway = name in _WHAT_HOLDS_ANYWAY and value.strip().lower() not in _OFF
            if matches and not holds_anyway:
                yield name, why


def _stands() -> list[_Stand]:
    given = read_server_variables()
    stands = []
    if given.save_dir is not None:
        stands.append(_Stand("TWINKLE_DEFAULT_SAVE_DIR", "", "data_dir", given.save_dir))
    if given.processor_limit is not None:
        name = "TWINKLE_PER_USER_PROCESSOR_LIMIT"
        stands.append(_Stand(name, "limits", "max_processors_per_tenant", given.processor_limit))
    if given.long_poll_seconds is not None:
        seconds = min(given.long_poll_seconds, ClientsConfig.LONGEST_POLL)  # clients ask again: they notice nothing
        stands.append(_Stand("TWINKLE_LONG_POLL_TIMEOUT", "clients", "long_poll_seconds", seconds))
    return stands
