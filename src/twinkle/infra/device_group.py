"""Named groups of devices, and where the worker processes of each group run."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.infra.platform import CPU, MPS, Platform
from twinkle.utils.logger import note_once

__all__ = ["DeviceGroup", "GroupPlan", "WorkerPlan", "find_group", "plan_groups"]


@dataclass(frozen=True)
class DeviceGroup:
    """A named group of devices; components are made on it with ``remote_group=<name>``.

    ``ranks`` is a list of device numbers, counted over all machines with ``nproc_per_node`` devices each, or just how
    many devices the group has: then its ranks follow the highest rank of the groups before it. For a CPU group it must
    be a number, the number of processes. Each worker process gets ``gpus_per_worker`` consecutive devices of the list.
    ``visible_devices`` is accepted for older scripts and has no effect: ``ranks`` chooses the devices.
    """

    name: str
    ranks: list[int] | int
    device_type: str
    gpus_per_worker: int = 1
    visible_devices: str | list[int] | None = None

    def __post_init__(self) -> None:
        platform = Platform.get_platform(self.device_type)
        count = self.ranks if isinstance(self.ranks, int) else len(self.ranks)
        if count < 1 or (isinstance(self.ranks, list) and min(self.ranks) < 0):
            raise InvalidInputError(f"ranks of group {self.name!r}", self.ranks, "a number ≥ 1 or a list of ranks ≥ 0")
        if self.visible_devices is not None:
            note_once(
                f"visible_devices of group {self.name!r}: no effect; devices are chosen by ranks (rank modulo "
                "nproc_per_node is the device's number on its machine)"
            )
        if self.gpus_per_worker < 1 or count % self.gpus_per_worker:
            allowed = f"a number that divides the group's {count} ranks"
            raise InvalidInputError(f"gpus_per_worker of group {self.name!r}", self.gpus_per_worker, allowed)
        if platform is CPU and self.gpus_per_worker != 1:
            raise InvalidInputError(f"gpus_per_worker of group {self.name!r}", self.gpus_per_worker, "1 for CPU")

    @property
    def platform(self) -> type[Platform]:
        return Platform.get_platform(self.device_type)


@dataclass(frozen=True)
class WorkerPlan:
    """The place of one worker process: the machine's number and the numbers of the devices it uses there."""

    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class GroupPlan:
    """A group after planning: its ranks are numbered and each worker has a machine and devices."""

    name: str
    platform: type[Platform]
    ranks: tuple[int, ...]
    gpus_per_worker: int
    workers: tuple[WorkerPlan, ...]

    @property
    def on_cpu(self) -> bool:
        return self.platform is CPU


def plan_groups(groups: Sequence[DeviceGroup], nproc_per_node: int, ncpu_proc_per_node: int) -> tuple[GroupPlan, ...]:
    """Number the ranks and place the workers of all groups; raise if groups overlap or their settings do not fit."""
    for field, value in (("nproc_per_node", nproc_per_node), ("ncpu_proc_per_node", ncpu_proc_per_node)):
        if value < 1:
            raise InvalidInputError(field, value, "a number ≥ 1")
    _check_names_and_platforms(groups)
    plans: list[GroupPlan] = []
    first_free = 0
    taken: dict[int, str] = {}
    for group in groups:
        if group.platform is CPU:
            plans.append(_cpu_plan(group, ncpu_proc_per_node))
            continue
        ranks = _numbered(group.ranks, first_free)
        for rank in ranks:
            if rank in taken:
                allowed = f"ranks that no other group has; {rank} belongs to group {taken[rank]!r}"
                raise InvalidInputError(f"ranks of group {group.name!r}", group.ranks, allowed)
            taken[rank] = group.name
        first_free = max(first_free, max(ranks) + 1)
        plans.append(_accelerator_plan(group, ranks, nproc_per_node))
    return tuple(plans)


def find_group(plans: Sequence[GroupPlan], name: str) -> GroupPlan:
    if not plans:  # TWINKLE_MODE is ray, and initialize was not called
        raise InvalidInputError("remote_group", name, "a group of initialize(mode='ray', groups=[…]): call that first")
    found = {plan.name: plan for plan in plans}
    if name not in found:
        raise UnknownNameError("remote_group", name, found)
    return found[name]


def _check_names_and_platforms(groups: Sequence[DeviceGroup]) -> None:
    names = [group.name for group in groups]
    if not names or len(set(names)) != len(names):
        raise InvalidInputError("groups", names, "one or more groups with different names")
    kinds = {group.platform.name for group in groups} - {CPU.name}
    if len(kinds) > 1:
        raise InvalidInputError("device_type of groups", sorted(kinds), "one kind of accelerator, beside CPU")


def _numbered(ranks: list[int] | int, first_free: int) -> tuple[int, ...]:
    return tuple(range(first_free, first_free + ranks)) if isinstance(ranks, int) else tuple(ranks)


def _cpu_plan(group: DeviceGroup, per_node: int) -> GroupPlan:
    if not isinstance(group.ranks, int):
        raise InvalidInputError(f"ranks of group {group.name!r}", group.ranks, "a number, for CPU processes")
    ranks = tuple(range(group.ranks))
    return GroupPlan(group.name, CPU, ranks, 1, tuple(WorkerPlan(rank // per_node, ()) for rank in ranks))


def _accelerator_plan(group: DeviceGroup, ranks: tuple[int, ...], per_node: int) -> GroupPlan:
    if group.platform is MPS:
        raise UnsupportedError(
            f"device_type of group {group.name!r}: MPS devices cannot be divided among workers; use mode='local'"
        )
    workers = []
    for start in range(0, len(ranks), group.gpus_per_worker):
        own = ranks[start : start + group.gpus_per_worker]
        nodes = sorted({rank // per_node for rank in own})
        if len(nodes) > 1:
            allowed = (
                f"devices of one machine for each worker; with nproc_per_node={per_node}, ranks {list(own)} are on "
            )
            allowed += f"machines {nodes}"
            raise InvalidInputError(f"gpus_per_worker of group {group.name!r}", group.gpus_per_worker, allowed)
        workers.append(WorkerPlan(nodes[0], tuple(rank % per_node for rank in own)))
    return GroupPlan(group.name, group.platform, ranks, group.gpus_per_worker, tuple(workers))
