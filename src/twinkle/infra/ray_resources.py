"""Connect to a Ray cluster, and reserve machines, devices and CPUs for the groups of a program.

One placement group, with a bundle on each machine, reserves the devices; another one reserves the CPUs of CPU groups.
Workers run inside these bundles and request no resources themselves, so several components can share a device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle.environment import read_environment
from twinkle.errors import InvalidInputError, ResourcesError
from twinkle.infra.device_group import GroupPlan
from twinkle.infra.platform import GPU, NPU

__all__ = ["WorkerPlace", "acquire", "release", "worker_places"]

_VISIBLE = [platform.visible_variable for platform in (GPU, NPU)]
_SECONDS_TO_WAIT = 60.0  # for resources that the cluster has, but that are in use at the moment


@dataclass(frozen=True)
class WorkerPlace:
    """The Ray options that start a worker in its place, and the environment variables that the worker gets."""

    options: Mapping[str, Any]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Reservation:
    """A placement group with one bundle for each of ``nodes``. ``devices``: each bundle's device ids on its machine."""

    group: Any
    nodes: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Cluster:
    """The resources that this program holds. ``started``: :func:`acquire` connected to Ray, so :func:`release`
    disconnects."""

    plans: tuple[GroupPlan, ...]
    accelerators: Reservation | None
    cpus: Reservation | None
    started: bool


_cluster: Cluster | None = None


def acquire(plans: tuple[GroupPlan, ...]) -> None:
    """Connect to Ray and reserve what ``plans`` need. A second call changes nothing; it raises for other plans."""
    global _cluster
    if _cluster is not None and ray.is_initialized():
        if plans != _cluster.plans:
            names = [plan.name for plan in plans]
            raise InvalidInputError("groups", names, "those of the first initialize(); call shutdown() before others")
        return
    started = not ray.is_initialized()
    if started:
        ray.init()
    try:
        accelerators = _reserve_accelerators([plan for plan in plans if not plan.on_cpu])
        cpus = _reserve_cpus([plan for plan in plans if plan.on_cpu])
    except ResourcesError:
        if started:
            ray.shutdown()
        raise
    _cluster = Cluster(plans, accelerators, cpus, started)


def release() -> None:
    """Release all reservations, which ends the workers in them; disconnect from Ray if :func:`acquire` connected."""
    global _cluster
    if _cluster is None:
        return
    cluster, _cluster = _cluster, None
    if not ray.is_initialized():  # the user has shut it down
        return
    for reservation in (cluster.accelerators, cluster.cpus):
        if reservation is not None:
            remove_placement_group(reservation.group)
    if cluster.started:
        ray.shutdown()


def worker_places(plan: GroupPlan) -> list[WorkerPlace]:
    assert _cluster is not None
    reservation = _cluster.cpus if plan.on_cpu else _cluster.accelerators
    assert reservation is not None
    nodes = sorted({worker.node for worker in plan.workers})
    places = []
    for worker in plan.workers:
        bundle = reservation.nodes.index(worker.node)
        strategy = PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=bundle)
        variables = {"NNODES": str(len(nodes)), "NODE_RANK": str(nodes.index(worker.node))}
        if plan.on_cpu:
            variables |= dict.fromkeys(_VISIBLE, "")  # a CPU process must not use devices of its machine
        else:
            names = reservation.devices[bundle]
            variables[plan.platform.visible_variable] = ",".join(names[device] for device in worker.devices)
        places.append(WorkerPlace({"num_cpus": 0, "scheduling_strategy": strategy}, variables))
    return places


def _reserve_accelerators(plans: Sequence[GroupPlan]) -> Reservation | None:
    """Reserve, on every machine that ``plans`` use, all devices up to the last one that is used.

    Ray reserves a number of devices, not particular ones: to use device 3 of a machine, devices 0 to 3 are reserved.
    """
    if not plans:
        return None
    resource = plans[0].platform.name
    needed: dict[int, int] = {}
    for worker in (worker for plan in plans for worker in plan.workers):
        needed[worker.node] = max(needed.get(worker.node, 0), 1 + max(worker.devices))
    group = _placed(resource, needed, "nproc_per_node says how many devices of one machine are used")
    probe = ray.remote(_device_names)
    probes = [
        probe.options(
            num_cpus=0,
            resources={resource: needed[node]} if resource != "GPU" else {},
            num_gpus=needed[node] if resource == "GPU" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote(resource)
        for bundle, node in enumerate(sorted(needed))
    ]
    return Reservation(group, tuple(sorted(needed)), tuple(map(tuple, ray.get(probes))))


def _reserve_cpus(plans: Sequence[GroupPlan]) -> Reservation | None:
    if not plans:
        return None
    per_process = read_environment().cpus_per_process
    needed: dict[int, float] = {}
    for worker in (worker for plan in plans for worker in plan.workers):
        needed[worker.node] = needed.get(worker.node, 0) + per_process
    advice = "ncpu_proc_per_node says how many processes of a group run on one machine, TWINKLE_CPU_PG_CPUS_PER_PROC "
    group = _placed("CPU", needed, f"{advice}how many of its CPUs each reserves (now {per_process:g})")
    return Reservation(group, tuple(sorted(needed)), ())


def _placed(resource: str, needed: Mapping[int, float], advice: str) -> Any:
    """Return a placement group with one bundle per machine; ``needed`` is how much of ``resource`` each bundle has."""
    wanted = [needed[node] for node in sorted(needed)]
    there = sorted((node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"]), reverse=True)
    enough = zip(sorted(wanted, reverse=True), there, strict=False)
    problem = f"the groups need {_listed(wanted, resource)}; the cluster has {_listed(there, resource)}. {advice}"
    if len(wanted) > len(there) or any(need > have for need, have in enough):
        raise ResourcesError(problem)
    group = placement_group([{resource: need} for need in wanted], strategy="STRICT_SPREAD")
    if not group.wait(_SECONDS_TO_WAIT):
        remove_placement_group(group)
        free = ray.available_resources().get(resource, 0.0)
        raise ResourcesError(f"{problem}; {free:g} of these are free, the others are in use")
    return group


def _listed(amounts: Sequence[float], resource: str) -> str:
    machines = "1 machine" if len(amounts) == 1 else f"{len(amounts)} machines"
    return f"{machines} with {', '.join(f'{amount:g}' for amount in amounts)} {resource}"


def _device_names(resource: str) -> list[str]:
    """Return the ids of the devices that Ray gave to this task."""
    return list(ray.get_runtime_context().get_accelerator_ids()[resource])
