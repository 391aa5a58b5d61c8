"""The server: Tinker's protocol over many tenants' adapters on shared base models."""

from pathlib import Path

__all__ = ["launch_server"]


def launch_server(config_path: str | Path | None = None) -> None:
    """Serve what the file says, or the demo model without one; returns when the server was shut down."""
    from twinkle.server.launch import launch  # the whole server: not for whoever needs a part of it

    launch(config_path)
