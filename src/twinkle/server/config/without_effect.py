"""Notes on keys that are valid but have no effect: on the chosen runtime, beside other keys, or without export."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from twinkle.server.config.applications import (
    ApplicationSpec,
    ModelArgs,
    ProcessorArgs,
    SamplerArgs,
    has_own_process,
    wanted_replicas,
)
from twinkle.server.config.meshes import has_sequence_parallel
from twinkle.server.config.sections import LimitsConfig, TelemetryConfig
from twinkle.server.config.sources import notes_on_application

_FOR_RAY = "has no effect on the embedded runtime; it is for the Ray runtime"
_RAY_LISTENS = "has no effect on the Ray runtime, where the proxies of Ray Serve accept connections"
_CONNECTION_LIMITS = ("max_connections_per_address", "max_header_bytes")
# Keys of ProcessorArgs that are for the Ray runtime.
_PROCESSOR_PLACEMENT = ("device_group", "device_mesh", "ncpu_proc_per_node", "nproc_per_node")


class Configuration(Protocol):
    """The sections of a :class:`~twinkle.server.config.ServerConfig` that :func:`without_effect` reads."""

    @property
    def runtime(self) -> str: ...

    @property
    def limits(self) -> LimitsConfig: ...

    @property
    def applications(self) -> Sequence[ApplicationSpec]: ...

    @property
    def telemetry(self) -> TelemetryConfig: ...


def without_effect(config: Configuration) -> list[str]:
    """Return notes on keys that were given and have no effect, such as options of Ray on the embedded runtime."""
    notes = []
    on_ray = config.runtime == "ray"
    if not on_ray:
        given_here = [key for key in ("proxy_location", "ray_namespace") if getattr(config, key) is not None]
        notes += [f"{key}: {_FOR_RAY}" for key in given_here]
    else:
        given_here = [key for key in _CONNECTION_LIMITS if key in config.limits.model_fields_set]
        notes += [f"limits.{key}: {_RAY_LISTENS}" for key in given_here]
    trained = {one.args.model_id: one.args for one in config.applications if isinstance(one.args, ModelArgs)}
    for index, application in enumerate(config.applications):
        at = f"applications[{index}]"
        notes += _on_ray(application, at) if on_ray else _embedded(application, at)
        notes += _sampling_share(application, trained, f"{at}.args.sampling_share", on_ray=on_ray)
        notes += _train_mode(application, f"{at}.args")
        notes += _weight_sets(application, trained, f"{at}.args.max_weight_sets")
        notes += _only_for_vllm(application, f"{at}.args")
    modes = {args.train_mode for args in trained.values()}
    if modes == {"full"} and "max_rank" in config.limits.model_fields_set:
        notes.append("limits.max_rank: has no effect, no model of this server has adapters (train_mode: full)")
    if not config.telemetry.enabled:
        given, default = config.telemetry.model_dump(), TelemetryConfig().model_dump()
        changed = [key for key in TelemetryConfig.EXPORT_KEYS if given[key] != default[key]]
        notes += [f"telemetry.{key}: has no effect while telemetry.enabled is false" for key in changed]
    return notes


def _embedded(application: ApplicationSpec, at: str) -> Iterator[str]:
    if application.deployments:
        yield f"{at}.deployments: {_FOR_RAY}"
    args = application.args
    if isinstance(args, ProcessorArgs):
        yield from (f"{at}.args.{key}: {_FOR_RAY}" for key in _PROCESSOR_PLACEMENT if key in args.model_fields_set)
    if isinstance(args, ModelArgs):
        yield from _mesh(args, f"{at}.args")


def _on_ray(application: ApplicationSpec, at: str) -> Iterator[str]:
    args = application.args
    if isinstance(args, ModelArgs):
        yield from _model(args, f"{at}.args")
    if isinstance(args, SamplerArgs):
        yield from _engines(args, f"{at}.args")
    if isinstance(args, ProcessorArgs):
        yield from _processor(application, args, f"{at}.args")
    for options in application.deployments:
        at = f"{at}.deployments[0]"
        scaling = options.autoscaling_config
        if scaling is not None and options.num_replicas is not None:
            yield f"{at}.num_replicas: has no effect beside autoscaling_config"
        if scaling is not None and application.import_path in ("model", "processor"):
            count = wanted_replicas(application)
            replicas = "1 replica" if count == 1 else f"{count} replicas"
            yield (
                f"{at}.autoscaling_config: means {replicas} from the start (max_replicas), and its other keys have no "
                "effect: adapters and processors do not move with the load"
            )
        actor = options.ray_actor_options
        if actor is not None and actor.runtime_env is not None:
            yield from notes_on_application(actor.runtime_env.env_vars, f"{at}.ray_actor_options.runtime_env.env_vars")


def _model(args: ModelArgs, at: str) -> Iterator[str]:
    group = args.device_group
    if args.device is not None and args.processes > 1:
        yield f"{at}.device: has no effect, the {args.processes} processes use the devices of device_group"
    if group is not None and group.gpus_per_worker > 1:
        yield f"{at}.device_group.gpus_per_worker: has no effect, a process of a model computes on one GPU"
    yield from _mesh(args, at)


def _engines(args: SamplerArgs, at: str) -> Iterator[str]:
    group, idle = args.device_group, args.idle_engines
    if idle:
        assert group is not None, "it asks for engines"
        used = f"{group.gpus_per_worker} of its {group.processes} devices"
        yield (
            f"{at}.device_mesh.dp_size: has no effect: a sampler has one engine for each replica of its model, on "
            f"{used} (more engines: num_replicas of the model)"
        )
    if group is not None and group.gpus_per_worker > 1 and group.device_type == "cpu":
        yield f"{at}.device_group.gpus_per_worker: has no effect on CPUs"


def _sampling_share(
    sampler: ApplicationSpec, trained: Mapping[str, ModelArgs], at: str, *, on_ray: bool
) -> Iterator[str]:
    args = sampler.args
    if not isinstance(args, SamplerArgs) or "sampling_share" not in args.model_fields_set:
        return
    if args.sampler_type == "vllm":
        yield f"{at}: has no effect, vLLM samples in processes of its own"
    elif on_ray and args.model_id in trained and has_own_process(sampler, trained[args.model_id]):
        yield f"{at}: has no effect, this sampler has its own process"


def _train_mode(application: ApplicationSpec, at: str) -> Iterator[str]:
    args = application.args
    if not isinstance(args, ModelArgs):
        return
    if args.train_mode == "full" and "merge" in args.model_fields_set:
        yield f"{at}.merge: has no effect with train_mode: full, where a replica has one run"
    if args.train_mode == "lora" and "max_replayed_steps" in args.model_fields_set:
        yield f"{at}.max_replayed_steps: has no effect with train_mode: lora; it is for train_mode: full"


def _only_for_vllm(sampler: ApplicationSpec, at: str) -> Iterator[str]:
    """A file for vLLM stays valid if only its sampler_type is changed, for a trial without GPUs."""
    args = sampler.args
    if isinstance(args, SamplerArgs) and args.sampler_type != "vllm":
        for key in ("engine_args", "memory_dir"):
            if getattr(args, key):
                yield f"{at}.{key}: has no effect with sampler_type: {args.sampler_type}, it is for vllm"


def _weight_sets(sampler: ApplicationSpec, trained: Mapping[str, ModelArgs], at: str) -> Iterator[str]:
    args = sampler.args
    if not isinstance(args, SamplerArgs) or "max_weight_sets" not in args.model_fields_set:
        return
    model = trained.get(args.model_id)
    if args.sampler_type == "mock":
        yield f"{at}: has no effect, a mock has no weights"
    elif model is not None and model.train_mode == "lora":
        yield f"{at}: has no effect with train_mode: lora, whose versions are adapters"


def _mesh(args: ModelArgs, at: str) -> Iterator[str]:
    if args.device_mesh is None or not args.device_mesh.sequence_parallel:
        return
    if args.backend != "megatron":
        yield f"{at}.device_mesh.sequence_parallel: has no effect, it is for backend: megatron"
    elif not has_sequence_parallel(args):
        yield f"{at}.device_mesh.sequence_parallel: has no effect without a tp_size above 1"


def _processor(application: ApplicationSpec, args: ProcessorArgs, at: str) -> Iterator[str]:
    group = args.device_group
    counts = {
        "ncpu_proc_per_node": args.ncpu_proc_per_node or 1,
        "nproc_per_node": args.nproc_per_node,
        "device_group.ranks": group.processes if group else 1,
    }
    if application.deployments and application.deployments[0].replicas is not None:
        for key, count in counts.items():
            if count > 1:
                yield f"{at}.{key}: has no effect where deployments[0] says how many replicas there are"
    if args.device_mesh is not None:
        yield f"{at}.device_mesh: has no effect, processors have one process for each session"
    if group is not None and (group.device_type == "cuda" or group.gpus_per_worker > 1 or group.visible_devices):
        yield f"{at}.device_group: no GPU is given to processors, only the number of its processes has an effect"
