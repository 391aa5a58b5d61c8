"""The server: Tinker's protocol over many tenants' adapters on shared base models."""

from twinkle.server.launch import launch_server

__all__ = ["launch_server"]
