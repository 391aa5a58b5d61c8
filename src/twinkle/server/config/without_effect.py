"""Keys that are right and do nothing here: each is said in a note."""

from collections.abc import Iterator

from twinkle.server.config.applications import PROCESSOR_PLACEMENT, ApplicationSpec, ModelArgs, ProcessorArgs
from twinkle.server.config.placement import DeviceGroup
from twinkle.server.config.sections import TelemetryConfig
from twinkle.server.config.server_config import ServerConfig
from twinkle.server.config.variables import notes_on_application

__all__ = ["without_effect"]

_RAY_CHOOSES = "has no effect on the Ray runtime, where Ray gives each process its GPU"


def without_effect(config: ServerConfig) -> list[str]:
    notes = list(_embedded(config) if config.runtime == "embedded" else _ray(config))
    if config.telemetry.enabled:
        return notes
    given, default = config.telemetry.model_dump(), TelemetryConfig().model_dump()
    changed = [key for key in TelemetryConfig.EXPORT_KEYS if given[key] != default[key]]
    return notes + [f"telemetry.{key}: has no effect while telemetry.enabled is false" for key in changed]


def _embedded(config: ServerConfig) -> Iterator[str]:
    keys = {"proxy_location": config.proxy_location, "ray_namespace": config.ray_namespace}
    unused = [key for key, value in keys.items() if value is not None]
    unused += [f"applications[{index}].deployments" for index, one in enumerate(config.applications) if one.deployments]
    for index, one in enumerate(config.applications):
        if isinstance(one.args, ProcessorArgs):
            given_here = sorted(PROCESSOR_PLACEMENT & one.args.model_fields_set)
            unused += [f"applications[{index}].args.{key}" for key in given_here]
    yield from (f"{key}: has no effect on the embedded runtime; it is for the Ray runtime" for key in unused)
    for index, one in enumerate(config.applications):
        if isinstance(one.args, ModelArgs):
            yield from _mesh(one.args, f"applications[{index}].args")


def _ray(config: ServerConfig) -> Iterator[str]:
    for index, one in enumerate(config.applications):
        at = f"applications[{index}].args"
        if isinstance(one.args, ModelArgs) and one.args.backend != "megatron":
            yield from _model(one.args, at)
        if isinstance(one.args, ProcessorArgs):
            yield from _processor(one, one.args, at)
        yield from _deployment(one, f"applications[{index}].deployments[0]")


def _model(args: ModelArgs, at: str) -> Iterator[str]:
    if args.device is not None and ":" in args.device:
        yield f"{at}.device: the number {_RAY_CHOOSES}"
    if args.device_group is not None:
        yield from _group(args.device_group, f"{at}.device_group")
        if args.device_group.gpus_per_worker > 1:
            yield f"{at}.device_group.gpus_per_worker: has no effect, a process of a model computes on one GPU"
    yield from _mesh(args, at)


def _mesh(args: ModelArgs, at: str) -> Iterator[str]:
    if args.device_mesh is not None and args.device_mesh.sequence_parallel and args.backend != "megatron":
        yield f"{at}.device_mesh.sequence_parallel: has no effect, it is for backend: megatron"


def _group(group: DeviceGroup, at: str) -> Iterator[str]:
    if isinstance(group.ranks, tuple) and group.ranks != tuple(range(len(group.ranks))):
        yield f"{at}.ranks: their numbers have no effect, only how many there are: Ray gives each process its GPU"
    if group.visible_devices is not None:
        yield f"{at}.visible_devices: {_RAY_CHOOSES}"


def _processor(one: ApplicationSpec, args: ProcessorArgs, at: str) -> Iterator[str]:
    counts = {
        f"{at}.ncpu_proc_per_node": args.ncpu_proc_per_node,
        f"{at}.nproc_per_node": args.nproc_per_node,
        f"{at}.device_group.ranks": args.device_group.processes if args.device_group else None,
    }
    if one.deployments and one.deployments[0].replicas is not None:
        idle = [path for path, count in counts.items() if count is not None and count > 1]
        yield from (f"{path}: has no effect where deployments[0] says how many replicas there are" for path in idle)
    if args.device_mesh is not None:
        yield f"{at}.device_mesh: has no effect, the processes of processors are told apart by sessions alone"
    group = args.device_group
    if group is not None and (group.device_type == "cuda" or group.gpus_per_worker > 1 or group.visible_devices):
        yield f"{at}.device_group: no GPU is given to processors, only the number of its processes has an effect"


def _deployment(one: ApplicationSpec, at: str) -> Iterator[str]:
    for options in one.deployments:
        if options.autoscaling_config is not None and options.num_replicas is not None:
            yield f"{at}.num_replicas: has no effect beside autoscaling_config"
        actor = options.ray_actor_options
        if actor is not None and actor.runtime_env is not None:
            yield from notes_on_application(actor.runtime_env.env_vars, f"{at}.ray_actor_options.runtime_env.env_vars")
