"""Reserve the GPUs that applications name by number (``device_group.ranks``), before anything is deployed.

Ray gives out some GPUs, not particular ones. So we take one GPU after another, ask which one it is, keep those that are
named and give back the others. Each GPU that we keep is held by a placement group of its own, which no process runs in;
so Ray counts the GPU as used, for other programs of the cluster too. The processes themselves ask Ray for no GPU; they
run on that machine and get the id of their GPU by CUDA_VISIBLE_DEVICES. A reservation stays until :func:`release`, so a
process that is started again finds its GPU.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.util import get_placement_group, placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from twinkle.environment import listed_devices
from twinkle.errors import TwinkleServerError
from twinkle.infra.platform import GPU
from twinkle.server.config.demand import Demand, claimed_gpus, total_gpus
from twinkle.server.runtime.ray.waiting import Report, ThrottledReport

_PLACED_SECONDS = 3.0  # in which Ray places a reservation, if there is a GPU for it
_PAUSE_SECONDS = 5.0  # between two looks for GPUs that are not there, or that others use
_ON_MACHINE = 0.001  # of the resource that every machine has one of


@dataclass(frozen=True)
class Place:
    """The machine of a replica that names GPUs, and the id of each named GPU there. By the GPU's number."""

    node_id: str
    address: str
    devices: Mapping[int, str]

    def variables(self, gpus: Sequence[int]) -> dict[str, str]:
        """Return the variable that shows a process these GPUs and no others."""
        return {GPU.visible_variable: ",".join(self.devices[gpu] for gpu in gpus)}

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources that bind a Serve replica to the machine."""
        return {f"node:{self.address}": _ON_MACHINE}

    @property
    def strategy(self) -> NodeAffinitySchedulingStrategy:
        """Return the strategy that binds an actor to the machine."""
        return NodeAffinitySchedulingStrategy(self.node_id, soft=False)


@dataclass(frozen=True)
class GpuMachine:
    """A machine of the cluster with ``gpus`` GPUs, numbered from 0."""

    node_id: str
    address: str
    gpus: int


def reserve(owner: str, demands: Sequence[Demand], report: Report) -> tuple[Place, ...]:
    """Reserve all named GPUs for the server ``owner``, and return the place of replicas 0, 1, … that name some.

    Waits for GPUs that others use, and reports it. TwinkleServerError if no machine has a GPU with such a number.
    """
    release(owner)  # of an earlier launch of this server
    claims = claimed_gpus(demands)
    if not claims:
        return ()
    naming = ", ".join(dict.fromkeys(one.application for one in demands if one.named_gpus and one.gpus))
    machines = _find_machines(claims, total_gpus(demands), naming, report)
    return tuple(
        _reserve_on(owner, machine, gpus, naming, report) for machine, gpus in zip(machines, claims, strict=True)
    )


def release(owner: str) -> None:
    """Give back the GPUs that are reserved for this server."""
    for one in placement_group_table().values():
        if one["name"].startswith(_prefix(owner)) and one["state"] != "REMOVED":
            remove_placement_group(get_placement_group(one["name"]))


def _prefix(owner: str) -> str:
    return f"twinkle GPU {owner} "


def _find_machines(
    claims: Sequence[Mapping[int, float]], needed: float, naming: str, report: Report
) -> Sequence[GpuMachine]:
    """Return a machine for each of ``claims``: this one first, the others in the order of their addresses."""
    highest = max(gpu for gpus in claims for gpu in gpus)
    own = ray.get_runtime_context().get_node_id()
    throttled = ThrottledReport(report)
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]
        nodes.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
        found = [
            GpuMachine(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"]["GPU"])) for node in nodes
        ]
        fitting = [machine for machine in found if machine.gpus > highest]
        if found and not fitting:
            most = max(machine.gpus for machine in found)
            has = "1 GPU, number 0" if most == 1 else f"{most} GPUs, numbers 0 to {most - 1}"
            raise TwinkleServerError(
                f"GPU {highest} is named by device_group of application {naming}, but no machine of the cluster has "
                f"more than {has}"
            )
        if len(fitting) >= len(claims):
            return fitting[: len(claims)]
        if not found:
            throttled(f"waiting for {needed:g} GPUs: the cluster has 0 (needed by application {naming})")
        else:
            wanted = f"{len(claims)} machines with GPU {highest}, one for each replica"
            throttled(f"waiting for {wanted}: the cluster has {len(fitting)} (needed by application {naming})")
        time.sleep(_PAUSE_SECONDS)


def _reserve_on(owner: str, machine: GpuMachine, gpus: Mapping[int, float], naming: str, report: Report) -> Place:
    ids = ray.get(ray.remote(_device_ids).options(num_cpus=0, scheduling_strategy=_on(machine)).remote())
    devices = {gpu: str(gpu) if ids is None else ids[gpu] for gpu in gpus}
    missing = {devices[gpu]: amount for gpu, amount in gpus.items()}
    throttled = ThrottledReport(report)
    while True:
        for amount in sorted(set(missing.values())):
            wanted = {device for device, part in missing.items() if part == amount}
            for device in _taken(owner, machine, wanted, amount):
                del missing[device]
        if not missing:
            return Place(machine.node_id, machine.address, devices)
        numbers = ", ".join(str(gpu) for gpu, device in devices.items() if device in missing)
        throttled(
            f"waiting for GPU {numbers} of machine {machine.address}, which has {machine.gpus} GPUs: another program "
            f"uses it (needed by application {naming})"
        )
        time.sleep(_PAUSE_SECONDS)


def _taken(owner: str, machine: GpuMachine, wanted: set[str], amount: float) -> set[str]:
    """Reserve this part of each wanted GPU, and return the ids of those that were free."""
    found: set[str] = set()
    others: list[Any] = []
    many = len(wanted)
    while wanted - found and many:
        groups = [_reservation(owner, machine, amount) for _ in range(many)]
        deadline = time.monotonic() + _PLACED_SECONDS
        placed = [group for group in groups if group.wait(max(0.1, deadline - time.monotonic()))]
        others += [group for group in groups if group not in placed]
        for group, device in zip(placed, ray.get([_ask(one, amount) for one in placed]), strict=True):
            if device in wanted - found:
                found.add(device)
            else:
                others.append(group)
        many = 2 * many if len(placed) == many else 0  # 0: all free GPUs have been looked at
    for group in others:
        remove_placement_group(group)
    return found


def _reservation(owner: str, machine: GpuMachine, amount: float) -> Any:
    bundle = {"GPU": amount, f"node:{machine.address}": _ON_MACHINE}
    return placement_group([bundle], name=f"{_prefix(owner)}{uuid4().hex}", lifetime="detached")


def _ask(reservation: Any, amount: float) -> Any:
    """Return a reference to the id of the GPU that a reservation holds."""
    where = PlacementGroupSchedulingStrategy(reservation)
    return ray.remote(_device_of_task).options(num_cpus=0, num_gpus=amount, scheduling_strategy=where).remote()


def _on(machine: GpuMachine) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(machine.node_id, soft=False)


def _device_ids() -> tuple[str, ...] | None:
    """Return the ids that CUDA_VISIBLE_DEVICES listed when Ray was started on this machine; None: it was not set."""
    return listed_devices(GPU.visible_variable)


def _device_of_task() -> str:
    (device,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(device)
