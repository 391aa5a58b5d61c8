"""The import path under which scripts look for these two."""

from twinkle.server.cli.launch import ServerLauncher, launch_server

__all__ = ["ServerLauncher", "launch_server"]
