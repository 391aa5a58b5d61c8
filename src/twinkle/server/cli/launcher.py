"""A server as Python programs start it. Light: the server itself is imported when it is launched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.server.config import ServerConfig

__all__ = ["ServerLauncher", "launch_server"]


@dataclass(frozen=True)
class ServerLauncher:
    """``ServerLauncher(config).launch()``: :func:`launch_server` for a configuration that is there already.

    ``ray_namespace``: in the place of the configuration's. ``notes`` are shown when the server serves.
    """

    config: "ServerConfig"
    ray_namespace: str | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check(self.config)

    def launch(self) -> None:
        """Serve until SIGTERM or SIGINT; from the main thread. Returns at once where there is nothing to serve."""
        from twinkle.server.cli.launch import run_server

        config = self.config
        if self.ray_namespace is not None:
            config = config.model_copy(update={"ray_namespace": self.ray_namespace})
        run_server(config, self.notes)


def launch_server(
    config: "ServerConfig | None" = None,
    config_path: str | Path | None = None,
    ray_namespace: str | None = None,
) -> None:
    """Serve this configuration, else what the file says, else the demo model, until SIGTERM or SIGINT."""
    if config is not None:
        ServerLauncher(config, ray_namespace).launch()
        return
    from twinkle.server.config import load_config

    loaded, notes = load_config(config_path, ray_namespace=ray_namespace)
    ServerLauncher(loaded, notes=tuple(notes)).launch()


def _check(config: object) -> None:
    """A dict would be an unchecked configuration."""
    from twinkle.server.config import ServerConfig

    if not isinstance(config, ServerConfig):
        raise TypeError(
            f"config: got a {type(config).__name__}, allowed: a ServerConfig; ServerConfig.model_validate makes one of "
            "a dict, ServerConfig.from_yaml (or config_path=) of a file"
        )
