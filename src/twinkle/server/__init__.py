"""The server: Tinker's protocol over many tenants' adapters on shared base models."""

from twinkle.server.cli.launch import ServerLauncher, launch_server

__all__ = ["ServerLauncher", "launch_server"]
