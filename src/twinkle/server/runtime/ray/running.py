"""``twinkle-server launch``, ``status`` and ``stop`` on the Ray runtime, and the protection of the cluster.

Anyone who reaches the ports of a Ray cluster can run any code on it, if they have its token or if it asks for none. So
a cluster that we start listens on the loopback address only and asks for a token, unless the environment says
otherwise. The variables for this are set before Ray is imported, because Ray reads them then.
"""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from twinkle.environment import RayVariables, read_ray_variables, set_variable_defaults
from twinkle.server.config import ServerConfig
from twinkle.server.runtime.generated_key import prepare_key_of
from twinkle.server.runtime.process import announcement, recorded
from twinkle.server.runtime.ray.proxy_answers import PROXY_CALLBACK, PROXY_VARIABLE
from twinkle.server.state.integrity.copies import new_secret
from twinkle.utils.progress import Progress

if TYPE_CHECKING:
    from twinkle.server.runtime.ray.launching import AppStatus

# Variables that Ray reads when it is imported or starts a process.
_SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # show every line of a replica, also repeated ones
    "RAY_SERVE_LOG_TO_STDERR": "0",  # Serve's own lines are in its log files
    "RAY_USAGE_STATS_ENABLED": "0",
    PROXY_VARIABLE: PROXY_CALLBACK,
}


def serve_ray(config: ServerConfig, notes: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT, then take the applications down. A signal also ends a launch that is deploying."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=True)
    from twinkle.server.runtime.ray import launching

    signals = StopSignals()
    with suppress(KeyboardInterrupt), signals.raising(), ExitStack() as held:
        record = held.enter_context(recorded(config.data_dir))
        about_key = asyncio.run(prepare_key_of(config))
        cluster = held.enter_context(launching.connected(config))
        signals.install()  # again: Ray has handlers of its own, which print a stack trace
        which = "one of its own" if cluster.is_ours else "one that was there"
        print(f"deploying on the Ray cluster at {cluster.address}, {which}", file=sys.stderr, flush=True)
        if cluster.is_ours:
            print(NO_DASHBOARD, file=sys.stderr, flush=True)
        with Progress("running a first task on the cluster"):
            asks_for_token = cluster.asks_for_token
        if not asks_for_token:
            print(OPEN_CLUSTER, file=sys.stderr, flush=True)
        with launching.deployed(config, cluster) as url:
            signals.raise_no_more()
            record(url, cluster.address)  # commands ask the server itself, not the proxy at public_url
            print(announcement(config, notes, [], config.public_url or url, about_key), flush=True)
            signals.wait()


class StopSignals:
    """SIGINT and SIGTERM of a launch: before the server serves they raise, later they end :meth:`wait`.

    Only the first one counts: what is taken down then must not be interrupted. What they raise is KeyboardInterrupt,
    because Ray's calls let nothing else through: any other exception of a handler becomes a SystemError there.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._raises = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within the context, until :meth:`raise_no_more`, the first signal raises KeyboardInterrupt here."""
        self._raises = True
        self.install()
        try:
            yield
        except SystemExit as error:  # of Ray's own handler, which is in force while Ray starts
            if error.code != signal.SIGTERM:
                raise
            print("SIGTERM: ended while Ray was starting", file=sys.stderr, flush=True)
            raise KeyboardInterrupt from None
        finally:
            self._raises = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def raise_no_more(self) -> None:
        self._raises = False

    def wait(self) -> None:
        """Block until one of the signals comes, or return at once if one came."""
        while not self._asked.wait(3600):
            pass

    def _end(self, number: int, _frame: object) -> None:
        if self._asked.is_set():
            return
        self._asked.set()
        doing = "taking down what is deployed" if self._raises else "finishing what runs"
        print(f"{signal.Signals(number).name}: {doing}", file=sys.stderr, flush=True)
        if self._raises:
            raise KeyboardInterrupt


def applications(config: ServerConfig, address: str | None = None) -> "dict[str, AppStatus]":
    """Return the status of each application of this configuration, as Serve reports it.

    ``address``: of the Ray cluster; None: the running one of RAY_ADDRESS or of this machine.
    """
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=False)
    from twinkle.server.runtime.ray import launching

    with launching.connected(config, start=False, address=address):
        return launching.statuses(config)


def take_down(config: ServerConfig) -> bool:
    """Take down the applications of a server whose own process is gone; return False if there are none."""
    set_variable_defaults(_SETTINGS)
    prepare_access(may_start=False)
    from twinkle.server.runtime.ray import launching

    with launching.connected(config, start=False) as cluster:
        if {one.status for one in launching.statuses(config).values()} <= {launching.NOT_DEPLOYED}:
            return False
        launching.remove(config, cluster)
        return True


# Ray's switch for clusters that only this machine reaches. It is meant for macOS and Windows, where that is the
# default, but Ray reads it on Linux, too. ray.init(_node_ip_address="127.0.0.1") would take the network's address.
_ONLY_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKEN = {"RAY_AUTH_MODE": "token"}
_CURRENT = "ray_current_cluster"  # the file in which `ray start` leaves the address of its cluster
_CONNECT_SECONDS = 5.0
NO_DASHBOARD = (
    "Ray's own dashboard is off on this cluster, because whoever reaches it can run code; `twinkle-server status` and "
    "the server's /dashboard show the applications, and `ray start --head --include-dashboard=true` before launch "
    "gives a cluster with one"
)
OPEN_CLUSTER = (
    "warning: this Ray cluster asks for no token: anyone who reaches its ports can run any code on it, as the user who "
    "started it, and read all tenants' data; start it with RAY_AUTH_MODE=token, or keep its ports from the network"
)


def prepare_access(may_start: bool) -> None:
    """Set the variables that decide where a cluster of ours listens, and whether a token is used.

    Variables that are already set stay. ``may_start``: a cluster is started if there is none to join.
    """
    variables = read_ray_variables()
    if may_start and _is_gone(variables):
        file = variables.directory / _CURRENT
        print(f"{file} names a Ray cluster that does not answer; launch starts its own", file=sys.stderr)
        set_variable_defaults({"RAY_ADDRESS": "local"})
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
    return (variables.directory / _CURRENT).exists()


def _is_gone(variables: RayVariables) -> bool:
    """Return whether the file of `ray start` names a cluster to which no connection is possible.

    Such a file stays behind if the cluster is killed. Ray would try to connect for more than a minute, and then fail.
    """
    file = variables.directory / _CURRENT
    if variables.address is not None or not file.exists():
        return False
    host, _, port = file.read_text().strip().rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
            return False
    except (OSError, ValueError):
        return True


def _has_token(variables: RayVariables) -> bool:
    return variables.token is not None or variables.token_path.is_file()


def _ensure_token(variables: RayVariables) -> None:
    """Make a token for this user's clusters if there is none. Ray would make one that every user can read."""
    if variables.token is None and not variables.token_path.exists():
        variables.token_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new_secret(variables.token_path)
