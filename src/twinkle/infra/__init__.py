"""How a program runs: its mode, its seed, and what its processes share on one machine."""

from twinkle.infra.initialization import Settings, current_seed, current_settings, initialize
from twinkle.infra.process_lock import process_lock

__all__ = ["Settings", "current_seed", "current_settings", "initialize", "process_lock"]
