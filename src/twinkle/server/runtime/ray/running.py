"""``twinkle-server launch``, ``status`` and ``stop`` on the Ray runtime."""

import sys
from collections.abc import Sequence

from twinkle.environment import set_variable_defaults
from twinkle.server.config import ServerConfig
from twinkle.server.runtime.process_record import recorded
from twinkle.server.runtime.ray.cluster_access import OPEN_CLUSTER, prepare_access
from twinkle.server.runtime.ray.proxy_answers import PROXY_CALLBACK, PROXY_VARIABLE
from twinkle.server.runtime.startup_banner import announcement

# What Ray reads when it is imported or starts a process.
_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # a replica's lines are shown as they are
    "RAY_SERVE_LOG_TO_STDERR": "0",  # Serve's own are in its files
    "RAY_USAGE_STATS_ENABLED": "0",
    PROXY_VARIABLE: PROXY_CALLBACK,
}


def serve_ray(config: ServerConfig, notes: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT, then take the applications down."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=True)
    from twinkle.server.runtime.ray import launching

    with recorded(config.data_dir) as record, launching.connected(config) as cluster:
        which = "one of its own" if cluster.is_ours else "one that was there"
        print(f"deploying on the Ray cluster at {cluster.address}, {which}", file=sys.stderr, flush=True)
        if not cluster.asks_for_token:
            print(OPEN_CLUSTER, file=sys.stderr, flush=True)
        with launching.deployed(config, cluster) as url:
            record(url)
            print(announcement(config, [*notes, *launching.scaling_notes(config)], [], url), flush=True)
            launching.wait_for_signal()


def applications(config: ServerConfig) -> dict[str, str]:
    """How Serve sees each application of this configuration, on the cluster that is there."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=False)
    from twinkle.server.runtime.ray import launching

    with launching.connected(config, start=False):
        return launching.statuses(config)


def take_down(config: ServerConfig) -> bool:
    """The applications of a server whose own process is gone; False: there are none."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=False)
    from twinkle.server.runtime.ray import launching

    with launching.connected(config, start=False) as cluster:
        if set(launching.statuses(config).values()) <= {launching.NOT_DEPLOYED}:
            return False
        launching.remove(config, cluster)
        return True
