"""``twinkle-server launch``, ``status`` and ``stop`` on the Ray runtime, and the protection of the cluster.

Anyone who reaches the ports of a Ray cluster can run any code on it, if they have its token or if it asks for none. So
a cluster that we start listens on the loopback address only and asks for a token, unless the environment says
otherwise. The variables for this are set before Ray is imported, because Ray reads them then.
"""

import sys
from collections.abc import Sequence

from twinkle.environment import RayVariables, read_ray_variables, set_variable_defaults
from twinkle.server.config import ServerConfig
from twinkle.server.runtime.process import announcement, recorded
from twinkle.server.runtime.ray.proxy_answers import PROXY_CALLBACK, PROXY_VARIABLE
from twinkle.server.state.integrity.copies import new_secret

# Variables that Ray reads when it is imported or starts a process.
_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # show every line of a replica, also repeated ones
    "RAY_SERVE_LOG_TO_STDERR": "0",  # Serve's own lines are in its log files
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
    """Return the status of each application of this configuration on the running cluster, as Serve reports it."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=False)
    from twinkle.server.runtime.ray import launching

    with launching.connected(config, start=False):
        return launching.statuses(config)


def take_down(config: ServerConfig) -> bool:
    """Take down the applications of a server whose own process is gone; return False if there are none."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=False)
    from twinkle.server.runtime.ray import launching

    with launching.connected(config, start=False) as cluster:
        if set(launching.statuses(config).values()) <= {launching.NOT_DEPLOYED}:
            return False
        launching.remove(config, cluster)
        return True


# Ray's switch for clusters that only this machine reaches. It is meant for macOS and Windows, where that is the
# default, but Ray reads it on Linux, too. ray.init(_node_ip_address="127.0.0.1") would take the network's address.
_ONLY_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKEN = {"RAY_AUTH_MODE": "token"}
OPEN_CLUSTER = (
    "warning: this Ray cluster asks for no token: anyone who reaches its ports can run any code on it, as the user who "
    "started it, and read all tenants' data; start it with RAY_AUTH_MODE=token, or keep its ports from the network"
)


def prepare_access(may_start: bool) -> None:
    """Set the variables that decide where a cluster of ours listens, and whether a token is used.

    Variables that are already set stay. ``may_start``: a cluster is started if there is none to join.
    """
    variables = read_ray_variables()
    if not _is_there_one(variables):
        set_variable_defaults(_ONLY_HERE)
        if may_start and variables.auth_mode is None:
            _ensure_token(variables)
    if variables.auth_mode is None and _has_token(variables):
        # Ray uses a token by itself for clusters that it finds, but contacts them without a token first.
        set_variable_defaults(_TOKEN)


def _is_there_one(variables: RayVariables) -> bool:
    """Return whether there is a cluster to join; looks where ``ray.init`` looks, in the documented order."""
    if variables.address is not None:
        return variables.address != "local"
    return (variables.directory / "ray_current_cluster").exists()


def _has_token(variables: RayVariables) -> bool:
    return variables.token is not None or variables.token_path.is_file()


def _ensure_token(variables: RayVariables) -> None:
    """Make a token for this user's clusters if there is none. Ray would make one that every user can read."""
    if variables.token is None and not variables.token_path.exists():
        variables.token_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new_secret(variables.token_path)
