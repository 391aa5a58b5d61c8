"""``twinkle.initialize``: what a program decides once, before it makes anything."""

from dataclasses import dataclass
from typing import Literal

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.framework_util import seed_everything
from twinkle.logger import get_logger

__all__ = ["Settings", "current_seed", "current_settings", "initialize"]

Mode = Literal["local", "ray"]

_DEFAULT_SEED = 42


@dataclass(frozen=True)
class Settings:
    """What :func:`initialize` was told. ``seed`` None: nothing was seeded."""

    mode: Mode = "local"
    seed: int | None = None
    full_determinism: bool = False
    name: str | None = None


# One program has one mode and one seed; everything that reads them is made after initialize().
_settings = Settings()


def initialize(
    mode: Mode = "local", seed: int | None = _DEFAULT_SEED, full_determinism: bool = False, name: str | None = None
) -> None:
    """Seed everything and set up logging. ``name`` is the program's, for its log lines."""
    global _settings
    if mode == "ray":
        raise UnsupportedError("mode: 'ray' is not there yet, allowed: 'local' (one process, or one per torchrun rank)")
    if mode != "local":
        raise InvalidInputError("mode", mode, "'local'")
    logger = get_logger()
    if seed is not None:
        seed_everything(seed, full_determinism)
    _settings = Settings(mode, seed, full_determinism, name)
    logger.info(f"{name or 'twinkle'}: mode {mode}, seed {seed}")


def current_settings() -> Settings:
    return _settings


def current_seed() -> int:
    """The seed of what was given none: TWINKLE_SEED, else that of :func:`initialize`, else 42."""
    for seed in (read_environment().seed, _settings.seed):
        if seed is not None:
            return seed
    return _DEFAULT_SEED
