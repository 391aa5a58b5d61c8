"""Deploy the server's applications on a Ray cluster, wait until they run, and take them down."""

import contextlib
import logging
import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus

from twinkle.environment import read_ray_variables, twinkle_variables
from twinkle.errors import TwinkleServerError
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ApplicationSpec, SamplerArgs, ServerArgs
from twinkle.server.config.demand import (
    GATEWAY_APPLICATION,
    Demand,
    demands_of,
)
from twinkle.server.config.rules import refuse_a_file_for_several_machines
from twinkle.server.runtime.process import listen, url_of
from twinkle.server.runtime.ray.deployments import application_for
from twinkle.server.runtime.ray.gpu_reservations import release, reserve
from twinkle.server.runtime.ray.layout import replica_names
from twinkle.server.runtime.ray.waiting import ThrottledReport, Waiting, last_log_lines, reason_in, shortages
from twinkle.utils.progress import Progress

DEFAULT_NAMESPACE = "twinkle_cluster"
NOT_DEPLOYED = "NOT_DEPLOYED"
_KEEP_ALIVE_SECONDS = 75
_POLL_SECONDS = 0.5
_TRIES = 20
_PATIENCE_SECONDS = 10.0  # without a change of status; then the reasons for waiting are printed
_SCHEDULING_SECONDS = 5.0  # in which Ray starts processes for which there are resources
_SERVE_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_SERVE_NAMESPACE, _REPLICA_ACTOR = "serve", "SERVE_REPLICA::"  # how Serve names the actors of replicas
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
def connected(config: ServerConfig, start: bool = True, address: str | None = None) -> Iterator[Cluster]:
    """Connect to the cluster at ``address``, else that of RAY_ADDRESS or of `ray start` on this machine.

    If there is none, start one, or raise TwinkleServerError if ``start`` is false.
    """
    try:
        with Progress("starting Ray, or joining its cluster"):
            context = _connect(config, address or (None if start else "auto"))
    except ConnectionError as error:
        said = read_ray_variables()
        where = f"at RAY_ADDRESS={said.address}" if said.address else "here, and RAY_ADDRESS names none"
        raise TwinkleServerError(
            f"no Ray cluster answers {where} ({error}). If the cluster asks for a token, set RAY_AUTH_MODE=token and "
            f"put the token into {said.token_path}; if it asks for none, set RAY_AUTH_MODE=disabled"
        ) from error
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
    """Deploy the applications and give the URL at which Serve listens.

    At the end, also after an error, :func:`remove` is called.
    """
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    refuse_a_file_for_several_machines(config.database_url, machines)
    total = ray.cluster_resources()
    has_gpus = total.get("GPU", 0.0) > 0
    demands = demands_of(config.applications, has_gpus)
    lacking = shortages(demands, total, {one.application for one in demands})
    if lacking and cluster.is_ours:  # no other machine can join it
        raise TwinkleServerError(
            f"the applications need {'; and '.join(lacking)}. launch started this cluster on this machine alone: "
            "ask for less (ray_actor_options), or join a larger cluster (RAY_ADDRESS)"
        )
    for line in lacking:
        _report(f"waiting for {line}")
    http = config.http_options
    host = "127.0.0.1" if http.host == "localhost" else http.host
    port = _port(config)
    try:
        with Progress("starting Ray Serve"):
            serve.start(
                proxy_location=config.proxy_location or "HeadOnly",
                http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=_KEEP_ALIVE_SECONDS),
            )
        places = reserve(str(config.data_dir), demands, _report)
        targets = [
            serve.RunTarget(application_for(config, one, has_gpus, places), one.name, route, _SERVE_LOGGING)
            for one, route in _served_at(config)
        ]
        with Progress("handing the applications to Ray Serve"):
            serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        _wait_until_running([target.name for target in targets], demands, config)
        url = url_of(http.host, port)
        if config.proxy_location != "Disabled":
            with Progress(f"waiting for the first answer at {url}"):
                _check_answers(url)
        yield url
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
            _delete(name, running[name])
    release(str(config.data_dir))
    if not cluster.is_ours and not serve.status().applications:
        serve.shutdown()


def _delete(name: str, application: serve.schema.ApplicationStatusOverview) -> None:
    """Delete an application and wait until Serve has done it. ``application``: what Serve reports about it before.

    A replica that has only started has no work to finish, and is killed: if it waits for resources, Serve would wait
    for it as long as for a replica with work (graceful_shutdown_timeout_s). ``serve.delete`` waits one minute at most,
    and a model may need longer, so it is not asked to wait.
    """
    starting = [one for one, found in application.deployments.items() if set(found.replica_states) == {"STARTING"}]
    prefixes = tuple(f"{_REPLICA_ACTOR}{name}#{deployment}#" for deployment in starting)
    serve.delete(name, _blocking=False)
    with Progress(f"waiting for the end of application {name}"):
        while (left := serve.status().applications.get(name)) is not None:
            if left.status == ApplicationStatus.DELETING:  # from now on Serve starts no other replica instead
                _kill_actors(prefixes)
            time.sleep(_POLL_SECONDS)


def _kill_actors(prefixes: tuple[str, ...]) -> None:
    """Kill the actors of Serve whose names begin with one of the prefixes."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == _SERVE_NAMESPACE and actor["name"].startswith(prefixes):
            with contextlib.suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(actor["name"], _SERVE_NAMESPACE))


@dataclass(frozen=True)
class AppStatus:
    """What Serve reports about an application: its status, and that of each deployment by name."""

    status: str
    deployments: Mapping[str, str]


def statuses(config: ServerConfig) -> dict[str, AppStatus]:
    """Return the status of each application of the server; NOT_DEPLOYED if Serve does not know it."""
    found = serve.status().applications
    return {
        one.name: AppStatus(
            found[one.name].status.value,
            {name: deployment.status.value for name, deployment in found[one.name].deployments.items()},
        )
        if one.name in found
        else AppStatus(NOT_DEPLOYED, {})
        for one, _ in _served_at(config)
    }


def _served_at(config: ServerConfig) -> list[tuple[ApplicationSpec, str | None]]:
    """Return the applications to deploy and their routes. A gateway is added if the configuration has none.

    The gateway is mounted at the root, because OpenAI's /v1 is not below its route_prefix; Serve still sends requests
    below another application's route to that application. An application without a route is reached through the
    gateway; a sampler without a route is not deployed by itself.
    """
    entries: list[tuple[ApplicationSpec, str | None]] = []
    if not any(isinstance(one.args, ServerArgs) for one in config.applications):
        entries.append((GATEWAY_APPLICATION, "/"))
    for one in config.applications:
        if isinstance(one.args, ServerArgs):
            entries.append((one, "/"))
        elif not isinstance(one.args, SamplerArgs) or one.route_prefix is not None:
            entries.append((one, one.route_prefix))
    return entries


def _wait_until_running(names: Sequence[str], demands: Sequence[Demand], config: ServerConfig) -> None:
    """Wait until all applications run. Print every change of status, and from time to time the reason for waiting.

    Such a reason is for example that the cluster lacks resources. TwinkleServerError if an application fails.
    """
    began, started = time.time(), time.monotonic()
    changed = started
    reports = {name: ThrottledReport(_report) for name in ("cluster", *names)}
    seen: dict[str, str] = {}
    while set(seen.values()) != {ApplicationStatus.RUNNING.value} or len(seen) < len(names):
        applications = serve.status().applications
        for name in names:
            status = applications[name].status if name in applications else ApplicationStatus.DEPLOYING
            if status in _FAILED:
                reason = _reason(applications[name]) or f"Serve gives no reason; see {config.data_dir / 'logs'}"
                raise TwinkleServerError(f"application {name} could not be deployed: {reason}")
            if seen.get(name) != status.value:
                changed = time.monotonic()
                _report(f"{name}: {status.value.lower()} ({changed - started:.0f} s)")
            seen[name] = status.value
        waiting = [name for name in names if seen[name] != ApplicationStatus.RUNNING.value]
        lacking = shortages(demands, ray.cluster_resources(), waiting) if waiting else []
        if lacking and time.monotonic() - started > _SCHEDULING_SECONDS:
            reports["cluster"]("; ".join(f"waiting for {line}" for line in lacking))
        elif time.monotonic() - changed > _PATIENCE_SECONDS:
            free = ray.available_resources()
            for name in waiting:
                reports[name](_waiting(config, name, applications.get(name), began).line(demands, free))
        time.sleep(_POLL_SECONDS)


def _waiting(
    config: ServerConfig, name: str, application: serve.schema.ApplicationStatusOverview | None, since: float
) -> Waiting:
    """Return what is known about an application that does not run. ``since``: when this launch began to deploy."""
    own = [replica for one, _ in _served_at(config) if one.name == name for replica in replica_names(one)]
    logged = last_log_lines(config.data_dir, own, since)
    if application is None:
        return Waiting(name, {}, None, logged)
    # Serve gives the states as plain strings, although it declares them as members of an enumeration of strings.
    states = {one: dict[str, int](found.replica_states.items()) for one, found in application.deployments.items()}
    return Waiting(name, states, _reason(application), logged)


def _reason(application: serve.schema.ApplicationStatusOverview) -> str | None:
    return reason_in([application.message, *(one.message for one in application.deployments.values())])


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
