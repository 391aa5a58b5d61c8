"""What the processes of a configuration ask of a Ray cluster: CPUs, GPUs, and GPUs by number.

The Ray runtime starts processes with these numbers, and ``launch`` and ``check-config`` compare them with what there
is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twinkle.extras import missing
from twinkle.server.config.applications import (
    ApplicationSpec,
    ModelArgs,
    ProcessorArgs,
    SamplerArgs,
    ServerArgs,
    has_own_process,
    resources_of,
    wanted_replicas,
)

LIGHT_CPUS = 0.1  # gateways, processors and mocks wait more than they work
GATEWAY_APPLICATION = ApplicationSpec(name="server", import_path="server")  # added where the configuration has none


@dataclass(frozen=True)
class Demand:
    """Processes of one application that ask for the same: ``count`` processes, each with ``cpus`` and ``gpus``.

    ``named_gpus``: the GPUs of one replica's processes, in their order, by number on their machine; (): Ray chooses.
    If some are named, ``gpus`` is the part of each, and ``replicas`` the number of machines on which they are taken.
    """

    application: str
    what: str  # replica, rank process or sampling process
    count: int
    cpus: float
    gpus: float = 0.0
    named_gpus: tuple[int, ...] = ()
    replicas: int = 1


def demands_of(applications: Sequence[ApplicationSpec], has_gpus: bool) -> list[Demand]:
    """Return what all processes ask for.

    ``has_gpus``: whether the cluster has GPUs. Models that name no device use them then.
    """
    models = {one.args.model_id: one for one in applications if isinstance(one.args, ModelArgs)}
    found: list[Demand] = []
    if not any(isinstance(one.args, ServerArgs) for one in applications):
        found.append(_gateways(GATEWAY_APPLICATION))
    for one in applications:
        if isinstance(one.args, ModelArgs):
            found.append(model_replica(one, one.args, has_gpus))
            if one.args.processes > 1:
                found.append(rank_process(one, one.args))
        elif isinstance(one.args, ProcessorArgs):
            cpus = resources_of(one).num_cpus
            found.append(Demand(one.name, "replica", wanted_replicas(one), LIGHT_CPUS if cpus is None else cpus))
        elif isinstance(one.args, SamplerArgs) and one.args.model_id in models:
            found += _sampler(one, models[one.args.model_id])
        else:
            found.append(_gateways(one))
    return found


def model_replica(one: ApplicationSpec, args: ModelArgs, has_gpus: bool) -> Demand:
    """Return what the replicas of a model ask for: CPUs, and a GPU if they compute on one themselves."""
    asked, replicas = resources_of(one), wanted_replicas(one)
    default = LIGHT_CPUS if args.backend == "mock" else 1.0
    cpus = default if asked.num_cpus is None else asked.num_cpus
    if args.processes > 1:  # the processes of the group have the GPUs
        return Demand(one.name, "replica", replicas, cpus)
    gpus, wanted = asked.num_gpus, args.compute_device
    if gpus is None:
        on_gpu = args.backend != "mock" and (has_gpus if wanted is None else wanted.startswith("cuda"))
        gpus = 1.0 if on_gpu else 0.0
    return Demand(one.name, "replica", replicas, cpus, gpus, args.named_gpus, replicas)


def rank_process(one: ApplicationSpec, args: ModelArgs) -> Demand:
    """Return what the processes of a model's group ask for."""
    asked, replicas = resources_of(one), wanted_replicas(one)
    gpus = (1.0 if asked.num_gpus is None else asked.num_gpus) if args.group_device == "cuda" else 0.0
    cpus = 1.0 if asked.num_cpus is None else asked.num_cpus
    return Demand(one.name, "rank process", replicas * args.processes, cpus, gpus, args.named_gpus, replicas)


def sampling_process(one: ApplicationSpec, model: ApplicationSpec) -> Demand:
    """Return what a sampler's own processes ask for, one for each replica of its model."""
    asked, replicas = resources_of(one), wanted_replicas(model)
    args = one.args
    assert isinstance(args, SamplerArgs), "a sampler application"
    group = args.device_group
    default = 0.0
    if sampling_device(one, model) == "cuda":
        default = 1.0 if group is None else group.gpus_per_worker
    gpus = default if asked.num_gpus is None else asked.num_gpus
    named = () if group is None else group.named_gpus
    cpus = 1.0 if asked.num_cpus is None else asked.num_cpus
    return Demand(one.name, "sampling process", replicas, cpus, min(1.0, gpus) if named else gpus, named, replicas)


def sampling_device(one: ApplicationSpec, model: ApplicationSpec) -> str:
    """Return the kind of device of a sampler's own process: the configured one, else that of the model."""
    assert isinstance(one.args, SamplerArgs), "a sampler application"
    assert isinstance(model.args, ModelArgs), "a model application"
    if one.args.device_group is not None:
        return one.args.device_group.device_type
    return "cuda" if resources_of(one).num_gpus else model.args.group_device


def claimed_gpus(demands: Sequence[Demand]) -> list[dict[int, float]]:
    """Return the part of each named GPU that is needed, for each machine in turn.

    The replica with number i of a model takes its GPUs on machine i. Processes that name the same GPU share it.
    """
    machines: list[dict[int, float]] = []
    for one in demands:
        for number in range(one.replicas if one.named_gpus and one.gpus else 0):
            if number == len(machines):
                machines.append({})
            for gpu in one.named_gpus:
                machines[number][gpu] = min(1.0, machines[number].get(gpu, 0.0) + one.gpus)
    return machines


def total_gpus(demands: Sequence[Demand]) -> float:
    """Return how many GPUs are needed together; a GPU that several processes name counts once."""
    unnamed = sum(one.count * one.gpus for one in demands if not one.named_gpus)
    return round(unnamed + sum(sum(machine.values()) for machine in claimed_gpus(demands)), 6)


def total_cpus(demands: Sequence[Demand]) -> float:
    return round(sum(one.count * one.cpus for one in demands), 6)


def sharing(demands: Sequence[Demand]) -> dict[int, list[str]]:
    """Return the applications that name the same GPU, by its number."""
    named: dict[int, list[str]] = {}
    for one in demands:
        for gpu in one.named_gpus:
            named.setdefault(gpu, []).append(one.application)
    return {gpu: names for gpu, names in sorted(named.items()) if len(set(names)) > 1}


def described(demands: Sequence[Demand], resource: str) -> str:
    """Return which processes need CPUs or GPUs, such as "2 rank processes of 1 (m), 0.3 for 3 other processes"."""
    amounts = [(one, one.cpus if resource == "CPU" else one.gpus) for one in demands]
    parts = [
        f"{_many(one.count, one.what)} of {amount:g} ({one.application})" for one, amount in amounts if amount >= 1
    ]
    small = [(one.count, amount) for one, amount in amounts if 0 < amount < 1]
    if small:
        total, count = sum(count * amount for count, amount in small), sum(count for count, _ in small)
        parts.append(f"{round(total, 6):g} for {_many(count, 'other process' if parts else 'process')}")
    return ", ".join(parts)


# --- notes for check-config -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The machine on which ``check-config`` runs: its CPUs and GPUs, and whether Ray is installed."""

    cpus: int
    gpus: int
    has_ray: bool


def machine_notes(applications: Sequence[ApplicationSpec], runtime: str, here: Machine) -> list[str]:
    """Return notes on what a launch on this machine alone would lack. Elsewhere, or on a cluster, it may be there."""
    if runtime != "ray":
        return list(_device_notes(applications, here))
    lacking = [] if here.has_ray else [str(missing("ray", "runtime: ray"))]
    return [*lacking, *_ray_notes(applications, here)]


def _ray_notes(applications: Sequence[ApplicationSpec], here: Machine) -> Iterator[str]:
    demands = demands_of(applications, here.gpus > 0)
    for resource, needed, there in (
        ("CPU", total_cpus(demands), here.cpus),
        ("GPU", total_gpus(demands), here.gpus),
    ):
        if needed > there:
            parts = described(demands, resource)
            yield (
                f"applications: need {needed:g} {resource}s ({parts}); this machine has {there}. A launch on this "
                "machine alone is refused, on a larger Ray cluster it is not"
            )
    machines = claimed_gpus(demands)
    if len(machines) > 1:
        yield (
            f"applications: name GPUs and have {len(machines)} replicas, each on a machine of its own: "
            f"{len(machines)} machines with these GPUs are needed"
        )
    for machine in machines[:1]:
        missing = [gpu for gpu in sorted(machine) if gpu >= here.gpus]
        if missing:
            names = ", ".join(map(str, missing))
            yield f"applications: name GPU {names} of a machine; this machine has {_many(here.gpus, 'GPU')}"
    for gpu, users in sharing(demands).items():
        yield (
            f"applications: {' and '.join(dict.fromkeys(users))} name GPU {gpu}, and share it: memory_budget_gib "
            "of a model and engine_args.gpu_memory_utilization of vLLM divide its memory"
        )


def _device_notes(applications: Sequence[ApplicationSpec], here: Machine) -> Iterator[str]:
    """Yield notes on GPUs that the embedded runtime would not find here."""
    for index, one in enumerate(applications):
        device = one.args.compute_device if isinstance(one.args, ModelArgs) and one.args.backend != "mock" else None
        if device is not None and device.startswith("cuda"):
            number = int(device.partition(":")[2] or 0)
            if number >= here.gpus:
                yield f"applications[{index}].args: uses {device}; this machine has {_many(here.gpus, 'GPU')}"


def _gateways(one: ApplicationSpec) -> Demand:
    asked = resources_of(one)
    options = one.deployments[0] if one.deployments else None
    count = 1
    if options is not None and options.autoscaling_config is not None:
        scale = options.autoscaling_config
        count = next((many for many in (scale.initial_replicas, scale.min_replicas) if many is not None), 1)
    elif options is not None:
        count = options.num_replicas or 1
    return Demand(
        one.name, "replica", count, LIGHT_CPUS if asked.num_cpus is None else asked.num_cpus, asked.num_gpus or 0.0
    )


def _sampler(one: ApplicationSpec, model: ApplicationSpec) -> Iterator[Demand]:
    assert isinstance(model.args, ModelArgs), "a model application"
    apart = has_own_process(one, model.args)
    if one.route_prefix is not None:
        door = _gateways(one)
        yield Demand(one.name, "replica", door.count, LIGHT_CPUS if apart else door.cpus)
    if apart:
        yield sampling_process(one, model)


def _many(count: int, what: str) -> str:
    ending = "es" if what.endswith("s") else "s"
    return f"{count} {what}" if count == 1 else f"{count} {what}{ending}"
