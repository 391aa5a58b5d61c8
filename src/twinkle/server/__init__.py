"""The server: trains and samples many tenants' adapters on shared base models, over three HTTP protocols."""

from twinkle.server.cli.launch import ServerLauncher, launch_server

__all__ = ["ServerLauncher", "launch_server"]
