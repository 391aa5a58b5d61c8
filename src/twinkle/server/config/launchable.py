"""What a configuration may ask for and this version cannot start: its files are checked, and refused at launch."""

from dataclasses import dataclass

from twinkle.errors import ConfigError, ConfigProblem
from twinkle.server.config.applications import ModelArgs
from twinkle.server.config.problems import path_of
from twinkle.server.config.server_config import ServerConfig

__all__ = ["NotYet", "not_yet", "refuse_what_is_not_yet"]


@dataclass(frozen=True)
class NotYet:
    """A valid value whose part of the server is missing."""

    path: str
    value: str
    missing: str
    instead: str

    @property
    def note(self) -> str:
        return f"{self.path}: {self.value} is good and cannot be launched yet: {self.missing} comes later"

    @property
    def problem(self) -> ConfigProblem:
        allowed = f"{self.instead} (not yet {self.value}: {self.missing} comes later)"
        return ConfigProblem(self.path, self.value, allowed)


def not_yet(config: ServerConfig) -> list[NotYet]:
    """All that stands in the way of a launch."""
    found = []
    for index, application in enumerate(config.applications):
        if isinstance(application.args, ModelArgs) and application.args.backend == "megatron":
            path = path_of(("applications", index, "args", "backend"))
            found.append(NotYet(path, "megatron", "the Megatron backend", "transformers or mock"))
    return found


def refuse_what_is_not_yet(config: ServerConfig) -> None:
    """For whoever is about to launch."""
    found = not_yet(config)
    if found:
        raise ConfigError.from_problems([one.problem for one in found], "launch")
