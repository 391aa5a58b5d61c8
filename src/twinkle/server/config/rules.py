"""Rules between the sections of a configuration. Each rule sees valid sections only.

Some rules hold for both runtimes, such as those about names; others refuse what the chosen runtime cannot do: the
embedded one is one process on one device. Notes on packages that are missing here are at the end.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from pydantic_core import InitErrorDetails

from twinkle.errors import InvalidInputError, TwinkleServerError, UserError
from twinkle.extras import missing, require
from twinkle.hub import parse_model_id
from twinkle.hub.model_id import ModelScopeId
from twinkle.server.config.applications import (
    GATEWAY_PREFIX,
    PROCESSOR_PREFIX,
    ApplicationSpec,
    ModelArgs,
    SamplerArgs,
    ServerArgs,
    has_own_process,
    is_path,
    resources_of,
    served_models,
)
from twinkle.server.config.meshes import find_mesh_problems
from twinkle.server.config.messages import path_of, refusal
from twinkle.server.config.placement import DeviceGroup, DeviceMesh
from twinkle.server.config.sections import AuthConfig, HttpOptions
from twinkle.utils.requirements import exists

Applications = Sequence[ApplicationSpec]
Broken = Iterator[InitErrorDetails]
Location = tuple[str | int, ...]
Args = TypeVar("Args", ServerArgs, ModelArgs, SamplerArgs)

_ONE_DEVICE = "1 (more processes or devices need runtime: ray)"
_DIVISION = "training is spread by dp_size and fsdp_size (backend: megatron has tp_size, pp_size and ep_size)"
_ONE_ENGINE = "a sampler has one engine for each replica of its model (more: num_replicas of the model)"
_SAMPLERS_OF_BACKEND = {"transformers": ("torch", "vllm"), "megatron": ("torch", "vllm"), "mock": ("mock",)}
_NOT_FOR_MOCK = ("dtype", "device", "compiled", "memory_budget_gib")


def network_rules(http: HttpOptions, auth: AuthConfig) -> list[InitErrorDetails]:
    """Return an error if other machines would reach an open server and ``allow_open_on_network`` is not set."""
    if auth.mode != "open" or auth.allow_open_on_network or http.is_loopback:
        return []
    allowed = (
        "localhost, 127.0.0.0/8 or ::1 while auth.mode is open. To listen here, leave auth.mode out (the first launch "
        "generates a key), set auth.mode: keys and create keys, or, if everybody who reaches the server may use it, "
        "set auth.allow_open_on_network: true"
    )
    return [_broken(("http_options", "host"), http.host, allowed)]


def application_rules(applications: Applications, runtime: str = "embedded") -> list[InitErrorDetails]:
    """Return the errors of all rules between applications that hold on this runtime, ``embedded`` or ``ray``."""
    on_ray = runtime == "ray"
    rules: list[Callable[[Applications], Broken]] = [
        _one_of_a_kind,
        _names_differ,
        _one_application_a_model,
        _routes,
        *((_groups_of_processes, _gpus_of_models) if on_ray else (_one_device,)),
        _megatron_meshes,
        _model_ids,
        _mock_computes_nothing,
        _samplers_have_their_model,
        _samplers_of_all_parameters,
        _one_engine_a_sampler if on_ray else _samplers_share_devices,
        _model_names_differ,
        _supported_models_exist,
    ]
    return [broken for rule in rules for broken in rule(applications)]


def _broken(location: Location, value: object, allowed: str) -> InitErrorDetails:
    """Return the error of a broken rule, at the key that is easiest to change."""
    return InitErrorDetails(type=refusal(allowed), loc=location, input=value)


def _with(applications: Applications, kind: type[Args]) -> Iterator[tuple[Location, Args]]:
    """Yield the arguments of this kind, each with its location."""
    for index, application in enumerate(applications):
        if isinstance(application.args, kind):
            yield ("applications", index, "args"), application.args


def _models_and_samplers(applications: Applications) -> list[tuple[Location, ModelArgs | SamplerArgs]]:
    return [*_with(applications, ModelArgs), *_with(applications, SamplerArgs)]


# --- applications and their names -------------------------------------------------------------------------------------


def _one_of_a_kind(applications: Applications) -> Broken:
    for kind in ("server", "processor"):
        found = [index for index, application in enumerate(applications) if application.import_path == kind]
        for index in found[1:]:
            yield _broken(("applications", index, "import_path"), kind, f"one {kind} application")


def _names_differ(applications: Applications) -> Broken:
    seen: set[str] = set()
    for index, application in enumerate(applications):
        if application.name in seen:
            yield _broken(("applications", index, "name"), application.name, "a name that no other application has")
        seen.add(application.name)


def _one_application_a_model(applications: Applications) -> Broken:
    seen: set[tuple[str, str]] = set()
    for at, args in _models_and_samplers(applications):
        kind = "model" if isinstance(args, ModelArgs) else "sampler"
        if (kind, args.model_id) in seen:
            more = "deployments[0].num_replicas on runtime: ray makes more"
            allowed = f"one {kind} application for each model_id ({more})"
            yield _broken((*at, "model_id"), args.model_id, allowed)
        seen.add((kind, args.model_id))


def _routes(applications: Applications) -> Broken:
    for index, application in enumerate(applications):
        route, kind = application.route_prefix, application.import_path
        fixed = {"server": GATEWAY_PREFIX, "processor": PROCESSOR_PREFIX}.get(kind)
        prefix = f"{GATEWAY_PREFIX}/{kind}/"
        if route is not None and not (route.startswith(prefix) if fixed is None else route == fixed):
            yield _broken(("applications", index, "route_prefix"), route, f"null or {fixed or prefix + 'NAME'}")


def _model_ids(applications: Applications) -> Broken:
    for at, args in _with(applications, ModelArgs):
        if args.backend == "mock" or is_path(args.model_id):
            continue
        try:
            parse_model_id(args.model_id)
        except UserError as error:
            allowed = error.allowed if isinstance(error, InvalidInputError) else f"a model that exists ({error})"
            yield _broken((*at, "model_id"), args.model_id, allowed)


def _model_names_differ(applications: Applications) -> Broken:
    served = served_models(applications)
    if len({one.model.model_id for one in served}) < len(served):
        return  # reported by its own rule
    uses = Counter(name for one in served for name in one.names)
    for (at, _), one in zip(_with(applications, ModelArgs), served, strict=True):
        for name in one.names:
            if uses[name] > 1:
                allowed = "names (model_id, aliases, end of route_prefix) that no other model has"
                yield _broken((*at, "aliases"), name, allowed)


def _supported_models_exist(applications: Applications) -> Broken:
    known = dict.fromkeys(name for one in served_models(applications) for name in one.names)
    allowed = f"names of the model applications: {', '.join(known) or 'none is configured'}"
    for at, args in _with(applications, ServerArgs):
        for name in args.supported_models or ():
            if name not in known:
                yield _broken((*at, "supported_models"), name, allowed)


# --- devices and processes --------------------------------------------------------------------------------------------


def _one_device(applications: Applications) -> Broken:
    """Refuse several processes or devices on the embedded runtime."""
    for at, args in _models_and_samplers(applications):
        if args.nproc_per_node > 1:
            yield _broken((*at, "nproc_per_node"), args.nproc_per_node, _ONE_DEVICE)
        group = args.device_group
        if group is not None and group.processes > 1:
            yield _broken((*at, "device_group", "ranks"), group.ranks, _ONE_DEVICE)
        if group is not None and group.gpus_per_worker > 1:
            yield _broken((*at, "device_group", "gpus_per_worker"), group.gpus_per_worker, _ONE_DEVICE)
        if group is not None and group.visible_count > 1:
            allowed = "one device (more need runtime: ray)"
            yield _broken((*at, "device_group", "visible_devices"), group.visible_devices, allowed)
        for key, value in _larger_sizes(args.device_mesh):
            yield _broken((*at, "device_mesh", key), value, _ONE_DEVICE if key != "mesh" else "one rank")


def _groups_of_processes(applications: Applications) -> Broken:
    """Refuse divisions of a model on Ray that its backend does not have.

    Transformers has data parallel and sharded data parallel training; a mock must not be divided at all. How a Megatron
    model is divided is checked by :func:`_megatron_meshes`.
    """
    for at, args in _with(applications, ModelArgs):
        group = args.device_group
        if group is not None and group.processes != args.processes:
            allowed = f"{args.processes}, as many as device_mesh or nproc_per_node has"
            yield _broken((*at, "device_group", "ranks"), group.ranks, allowed)
        if args.backend != "megatron" and (args.processes > 1 or _larger_sizes(args.device_mesh)):
            yield from _division(args, at)
        if args.device_group is not None:
            yield from _named_gpus(args.device_group, args.processes, at)


def _division(args: ModelArgs, at: Location) -> Broken:
    mesh = args.device_mesh
    if args.backend == "mock" and args.processes > 1:
        yield _broken((*at, "device_group"), args.processes, "1 process for a model with backend: mock")
    for key, value in _larger_sizes(mesh):
        if key not in ("world_size", "dp_size", "fsdp_size", "mesh"):
            sequences = "; sequences are divided by the library's TransformersModel only"
            allowed = f"1: {_DIVISION}{sequences if key == 'ulysses_size' else ''}"
            yield _broken((*at, "device_mesh", key), value, allowed)
    if mesh is None:
        return
    others = [name for name, size in mesh.dimensions.items() if size > 1 and name not in ("dp", "fsdp")]
    if others:
        yield _broken((*at, "device_mesh", "mesh_dim_names"), list(mesh.mesh_dim_names or ()), f"dp, fsdp: {_DIVISION}")
    product = (mesh.dp_size or 1) * (mesh.fsdp_size or 1)
    if mesh.world_size is not None and mesh.mesh is None and mesh.world_size not in (1, product):
        allowed = f"{product}, which is dp_size × fsdp_size"
        yield _broken((*at, "device_mesh", "world_size"), mesh.world_size, allowed)
    elif mesh.size != args.processes and not others:
        allowed = f"{args.processes} processes, as many as device_group or nproc_per_node has"
        yield _broken((*at, "device_mesh"), mesh.size, allowed)


def _megatron_meshes(applications: Applications) -> Broken:
    """Refuse meshes that a Megatron model cannot have, and models that Megatron cannot run."""
    for at, args in _with(applications, ModelArgs):
        if args.backend == "megatron":
            for found in find_mesh_problems(args):
                yield _broken((*at, *found.key), found.value, found.allowed)


def _named_gpus(group: DeviceGroup, processes: int, at: Location) -> Broken:
    """Refuse a list that names a GPU twice, or does not name one for each process."""
    named = group.named_gpus
    key, value = ("ranks", group.ranks) if group.visible_devices is None else ("visible_devices", group.visible_devices)
    if len(set(named)) < len(named):
        yield _broken((*at, "device_group", key), value, "each GPU once")
    elif named and len(named) != processes and key == "visible_devices":
        yield _broken((*at, "device_group", key), value, f"{processes}, one GPU for each process")


def _gpus_of_models(applications: Applications) -> Broken:
    """Refuse a num_gpus of 0 for a model that computes on GPUs, and one above 1 if each process has one GPU."""
    for index, one in enumerate(applications):
        if not isinstance(one.args, ModelArgs) or one.args.backend == "mock":
            continue
        given, group = resources_of(one).num_gpus, one.args.processes > 1
        device = one.args.group_device if group else one.args.compute_device or "cpu"
        most = 1.0 if group or one.args.named_gpus else float("inf")
        if given is not None and device.startswith("cuda") and not 0 < given <= most:
            allowed = "a number > 0" if most > 1 else "a number > 0 and ≤ 1: the part of the GPU of each process"
            at = ("applications", index, "deployments", 0, "ray_actor_options", "num_gpus")
            yield _broken(at, given, allowed)


def _larger_sizes(mesh: DeviceMesh | None) -> list[tuple[str, object]]:
    """Return the keys of a mesh whose size is above 1, and ``mesh`` if it has several ranks, with their values."""
    return [] if mesh is None else [(key, mesh.model_dump(mode="json")[key]) for key in mesh.larger_than_one()]


def _mock_computes_nothing(applications: Applications) -> Broken:
    for at, args in _with(applications, ModelArgs):
        for key in _NOT_FOR_MOCK if args.backend == "mock" else ():
            if (value := getattr(args, key)) not in (None, False):
                yield _broken((*at, key), value, "nothing with backend: mock, which does not use it")


# --- samplers ---------------------------------------------------------------------------------------------------------


def _samplers_have_their_model(applications: Applications) -> Broken:
    models = {args.model_id: args for _, args in _with(applications, ModelArgs)}
    for at, sampler in _with(applications, SamplerArgs):
        if sampler.model_id not in models:
            known = ", ".join(models) or "none is configured"
            allowed = f"the model_id of a model application, which sampling needs for now: {known}"
            yield _broken((*at, "model_id"), sampler.model_id, allowed)
            continue
        backend = models[sampler.model_id].backend
        if sampler.sampler_type not in _SAMPLERS_OF_BACKEND[backend]:
            allowed = f"{' or '.join(_SAMPLERS_OF_BACKEND[backend])}, as the model's backend is {backend}"
            yield _broken((*at, "sampler_type"), sampler.sampler_type, allowed)


def _samplers_of_all_parameters(applications: Applications) -> Broken:
    """Refuse vLLM for a model that trains all its parameters."""
    for at, _, sampler, model in _samplers(applications):
        if model.train_mode == "full" and sampler.sampler_type == "vllm":
            allowed = "torch with train_mode: full: a version is a whole set of weights, and vLLM takes adapters only"
            yield _broken((*at, "sampler_type"), sampler.sampler_type, allowed)


def _samplers_share_devices(applications: Applications) -> Broken:
    """Refuse a sampler that names another device than its model does, on the embedded runtime."""
    for at, _, sampler, model in _samplers(applications):
        yield from _shares_device(sampler, model, at)


def _one_engine_a_sampler(applications: Applications) -> Broken:
    """Refuse several engines for a sampler on Ray, and GPUs that its one engine cannot use.

    Each replica of the model has one engine: in the replica's process, or in a process of the engine's own.
    """
    for at, application, sampler, model in _samplers(applications):
        apart = has_own_process(application, model)
        if not apart:
            yield from _shares_device(sampler, model, at)
        if sampler.nproc_per_node > 1 and not sampler.idle_engines:
            yield _broken((*at, "nproc_per_node"), sampler.nproc_per_node, f"1: {_ONE_ENGINE}")
        gpus = 1 if sampler.device_group is None else sampler.device_group.gpus_per_worker
        on_cpu = sampler.device_group is not None and sampler.device_group.device_type == "cpu"
        if gpus > 1 and not (apart and sampler.sampler_type == "vllm") and not on_cpu:
            allowed = "1 (more are for vLLM with a device_group of its own)"
            yield _broken((*at, "device_group", "gpus_per_worker"), gpus, allowed)
        yield from _one_engine(sampler, gpus, at)
        names = {one.device_group.name for one in (sampler, model) if one.device_group is not None}
        if model.processes > 1 and sampler.device_group and model.device_group and len(names) == 1:
            allowed = "a group that is not the model's, whose processes train"
            yield _broken((*at, "device_group", "name"), sampler.device_group.name, allowed)


def _one_engine(sampler: SamplerArgs, gpus: int, at: Location) -> Broken:
    group, many = sampler.device_group, sampler.idle_engines > 0
    if group is not None and group.processes not in (1, gpus) and not many:
        yield _broken((*at, "device_group", "ranks"), group.ranks, f"{gpus}, as gpus_per_worker: {_ONE_ENGINE}")
    elif group is not None and isinstance(group.ranks, tuple) and group.named_gpus and len(group.named_gpus) != gpus:
        yield _broken((*at, "device_group", "ranks"), group.ranks, f"{gpus} GPUs, as gpus_per_worker says")
    elif group is not None:
        yield from _named_gpus(group, gpus, at)
    for key, value in _larger_sizes(sampler.device_mesh):
        of_engine = key in ("world_size", "tp_size")
        if key == "dp_size" and many:
            continue
        if not of_engine or value != gpus:
            allowed = f"{gpus}, as gpus_per_worker" if of_engine else "1"
            yield _broken((*at, "device_mesh", key), value, f"{allowed}: {_ONE_ENGINE}")


def _samplers(applications: Applications) -> Iterator[tuple[Location, ApplicationSpec, SamplerArgs, ModelArgs]]:
    """Yield the samplers that have a model, each with its location and the model."""
    models = {args.model_id: args for _, args in _with(applications, ModelArgs)}
    for index, one in enumerate(applications):
        if isinstance(one.args, SamplerArgs) and one.args.model_id in models:
            yield ("applications", index, "args"), one, one.args, models[one.args.model_id]


def _shares_device(sampler: SamplerArgs, model: ModelArgs, at: Location) -> Broken:
    wanted = sampler.device_group.device if sampler.device_group else None
    if wanted is not None and model.backend != "mock" and model.compute_device not in (None, wanted):
        yield _broken((*at, "device_group"), wanted, f"the device of the model: {model.compute_device}")


# --- packages and machines --------------------------------------------------------------------------------------------


def package_notes(applications: Applications) -> list[str]:
    """Return notes on packages that are needed and not installed here: vLLM, megatron-core, and ModelScope's."""
    notes = []
    if not exists("megatron-core"):
        needed = [at for at, args in _with(applications, ModelArgs) if args.backend == "megatron"]
        notes += [str(missing("megatron", f"{path_of((*at, 'backend'))}: megatron")) for at in needed]
    if not exists("vllm"):
        needed = [at for at, args in _with(applications, SamplerArgs) if args.sampler_type == "vllm"]
        notes += [str(missing("vllm", f"{path_of((*at, 'sampler_type'))}: vllm")) for at in needed]
    if not exists("modelscope"):
        loaded = [(at, args) for at, args in _with(applications, ModelArgs) if args.backend != "mock"]
        from_hub = [(at, args) for at, args in loaded if isinstance(parse_model_id(args.model_id), ModelScopeId)]
        notes += [str(missing("modelscope", f"{path_of((*at, 'model_id'))}: {args.model_id}")) for at, args in from_hub]
    return notes


def require_packages(applications: Applications) -> None:
    """Raise MissingDependencyError if megatron-core is needed and not installed here, before any process is started."""
    for at, args in _with(applications, ModelArgs):
        if args.backend == "megatron":
            require("megatron", f"{path_of((*at, 'backend'))}: megatron")


def refuse_a_file_for_several_machines(database_url: str, machines: Collection[str]) -> None:
    """Raise TwinkleServerError if the state is in a SQLite file and a cluster has several ``machines`` (addresses)."""
    if len(machines) > 1 and database_url.startswith("sqlite:"):
        raise TwinkleServerError(
            f"persistence: the cluster has {len(machines)} machines ({', '.join(sorted(machines))}), and a SQLite file "
            "works on one machine only. Set persistence.url: postgresql://… and a data_dir that all of them share"
        )
