"""An import path that older scripts use for the launcher, which is in ``twinkle.server.cli.launch``."""

from twinkle.server.cli.launch import ServerLauncher, launch_server

__all__ = ["ServerLauncher", "launch_server"]
