"""``twinkle-server launch`` on the Ray runtime."""

import sys
from collections.abc import Sequence

from twinkle.environment import set_variable_defaults
from twinkle.server.announcement import announcement
from twinkle.server.config import ServerConfig

# What Ray reads when it is imported or starts a process.
_QUIETER = {
    "RAY_DEDUP_LOGS": "0",  # a replica's lines are shown as they are
    "RAY_SERVE_LOG_TO_STDERR": "0",  # Serve's own are in its files
    "RAY_USAGE_STATS_ENABLED": "0",
}


def serve_ray(config: ServerConfig, notes: Sequence[str], log_level: str) -> None:
    """Serve until SIGTERM or SIGINT, then take the applications down."""
    set_variable_defaults(_QUIETER)
    from twinkle.server.ray_serve import launching

    with launching.connected(config) as address:
        print(f"deploying on the Ray cluster at {address}", file=sys.stderr, flush=True)
        with launching.deployed(config, log_level) as url:
            print(announcement(config, [*notes, *launching.scaling_notes(config)], [], url), flush=True)
            launching.wait_for_signal()
