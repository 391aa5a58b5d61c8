"""Deploy the server's applications on a Ray cluster, wait until they run, and take them down."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus

from twinkle.environment import read_ray_variables, twinkle_variables
from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, SamplerArgs, ServerArgs
from twinkle.server.runtime.process import listen, url_of
from twinkle.server.runtime.ray.deployments import application_for, gpus_wanted
from twinkle.server.runtime.ray.layout import wanted_replicas

DEFAULT_NAMESPACE = "twinkle_cluster"
NOT_DEPLOYED = "NOT_DEPLOYED"
_KEEP_ALIVE_SECONDS = 75
_POLL_SECONDS = 0.5
_TRIES = 20
_PATIENCE_SECONDS = 30.0  # without a change of status; then the reasons for waiting are printed again
_SERVE_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster. ``is_ours``: this process started it, and it ends with this process."""

    address: str
    is_ours: bool

    @property
    def asks_for_token(self) -> bool:
        """Return whether the cluster asks for a token. A task on it reads this from the variables of its node."""
        mode: str | None = ray.get(ray.remote(num_cpus=0)(_auth_mode).remote())
        return mode == "token"


def _auth_mode() -> str | None:
    return read_ray_variables().auth_mode


@contextlib.contextmanager
def connected(config: ServerConfig, start: bool = True) -> Iterator[Cluster]:
    """Connect to the cluster of RAY_ADDRESS or of `ray start` on this machine, until the context ends.

    If there is none, start one, or raise TwinkleServerError if ``start`` is false.
    """
    try:
        context = _connect(config, None if start else "auto")
    except ConnectionError as error:
        raise TwinkleServerError("no Ray cluster runs here, and RAY_ADDRESS names none") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        info = context.address_info
        yield Cluster(info["gcs_address"], info["session_dir"].endswith(f"_{os.getpid()}"))
    finally:
        ray.shutdown()


def _connect(config: ServerConfig, address: str | None) -> ray.runtime_context.RuntimeContext:
    return ray.init(
        address,
        namespace=config.ray_namespace or DEFAULT_NAMESPACE,
        runtime_env={"env_vars": twinkle_variables()},
        include_dashboard=False,
        log_to_driver=False,  # replicas write files of their own
        logging_level="warning",
    )


@contextlib.contextmanager
def deployed(config: ServerConfig, cluster: Cluster) -> Iterator[str]:
    """Deploy the applications and give the server's URL. At the end, also after an error, :func:`remove` is called."""
    http = config.http_options
    port = _port(config)
    host = "127.0.0.1" if http.host == "localhost" else http.host
    serve.start(
        proxy_location=config.proxy_location or "HeadOnly",
        http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=_KEEP_ALIVE_SECONDS),
    )
    gpus = ray.cluster_resources().get("GPU", 0.0)
    wanted = gpus_wanted(config, gpus > 0)
    if wanted > gpus:
        _tell(f"the applications ask for {wanted:g} GPUs and the cluster has {gpus:g}: they wait until it has more")
    targets = [
        serve.RunTarget(application_for(config, one, gpus > 0), one.name, route, _SERVE_LOGGING)
        for one, route in _served_at(config)
    ]
    try:
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _wait_until_running([target.name for target in targets])
        url = url_of(http.host, port)
        if config.proxy_location != "Disabled":
            _check_answers(url)
        yield config.public_url or url
    finally:
        remove(config, cluster)


def remove(config: ServerConfig, cluster: Cluster) -> None:
    """Take this server's applications down; each finishes the work that runs. Those of others stay.

    The gateway goes last. On a cluster of ours it is not deleted but ends with the cluster and its proxies: a proxy
    without a gateway answers 404, at which clients give up instead of trying again.
    """
    running = serve.status().applications
    names = [one.name for one, _ in _served_at(config) if one.name in running]
    gateways = [one.name for one, _ in _served_at(config) if isinstance(one.args, ServerArgs)]
    for name in sorted(names, key=gateways.count):
        if name not in gateways or not cluster.is_ours:
            serve.delete(name)
    if not cluster.is_ours and not serve.status().applications:
        serve.shutdown()


def statuses(config: ServerConfig) -> dict[str, str]:
    """Return the status that Serve reports for each application of the server; NOT_DEPLOYED if it reports none."""
    found = serve.status().applications
    return {
        one.name: found[one.name].status.value if one.name in found else NOT_DEPLOYED for one, _ in _served_at(config)
    }


def scaling_notes(config: ServerConfig) -> list[str]:
    """Return notes on ``autoscaling_config`` of applications whose replicas hold state and cannot be autoscaled."""
    return [
        f"{one.name}: autoscaling_config means {count} replicas from the start: adapters do not move with the load"
        for one in config.applications
        if one.import_path in ("model", "processor")
        and one.deployments
        and one.deployments[0].autoscaling_config is not None
        and (count := wanted_replicas(one)) > 1
    ]


def wait_for_signal() -> None:
    """Block until SIGINT or SIGTERM."""
    asked = threading.Event()

    def end(number: int, _frame: object) -> None:
        print(f"{signal.Signals(number).name}: finishing what runs", file=sys.stderr, flush=True)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while not asked.wait(3600):
        pass


def _served_at(config: ServerConfig) -> list[tuple[ApplicationSpec, str | None]]:
    """Return the applications to deploy and their routes. A gateway is added if the configuration has none.

    The gateway is mounted at the root, because OpenAI's /v1 is not below its route_prefix; Serve still sends requests
    below another application's route to that application. An application without a route is reached through the
    gateway; a sampler without a route is not deployed by itself.
    """
    entries: list[tuple[ApplicationSpec, str | None]] = []
    if not any(isinstance(one.args, ServerArgs) for one in config.applications):
        entries.append((ApplicationSpec(name="server", import_path="server"), "/"))
    for one in config.applications:
        if isinstance(one.args, ServerArgs):
            entries.append((one, "/"))
        elif not isinstance(one.args, SamplerArgs) or one.route_prefix is not None:
            entries.append((one, one.route_prefix))
    return entries


def _wait_until_running(names: Sequence[str]) -> None:
    """Wait until all applications run. Print every change of status, and from time to time the reason for waiting.

    Such a reason is for example that the cluster lacks resources. TwinkleServerError if an application fails.
    """
    started = told = time.monotonic()
    seen: dict[str, str] = {}
    while set(seen.values()) != {ApplicationStatus.RUNNING.value} or len(seen) < len(names):
        applications = serve.status().applications
        for name in names:
            status = applications[name].status if name in applications else ApplicationStatus.DEPLOYING
            if status in _FAILED:
                raise TwinkleServerError(f"application {name} could not be deployed: {_reason(applications[name])}")
            if seen.get(name) != status.value:
                told = time.monotonic()
                _tell(f"{name}: {status.value.lower()} ({told - started:.0f} s)")
            seen[name] = status.value
        if time.monotonic() - told > _PATIENCE_SECONDS:
            told = time.monotonic()
            for name in [name for name in names if seen[name] != ApplicationStatus.RUNNING.value]:
                _tell(f"{name}: {_reason(applications[name]) if name in applications else 'Serve has not begun'}")
        time.sleep(_POLL_SECONDS)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _reason(application: serve.schema.ApplicationStatusOverview) -> str:
    messages = [application.message, *(one.message for one in application.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "Serve does not say why")


def _port(config: ServerConfig) -> int:
    """Return the server's port. Raise at once if another program, not Serve's own proxy, has taken it."""
    http = config.http_options
    if http.port and (config.proxy_location == "Disabled" or serve.status().proxies):
        return http.port
    with listen(http.host, http.port) as listener:
        return int(listener.getsockname()[1])


def _check_answers(url: str) -> None:
    """Raise if the server does not answer: Serve keeps the address that it was first started with, perhaps another."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
            return
        time.sleep(_POLL_SECONDS)
    raise TwinkleServerError(
        f"the applications run, but nothing answers at {url}: perhaps Serve was already running on this cluster and "
        "still listens on its earlier address; then set http_options to that, or run `serve shutdown` first"
    )
