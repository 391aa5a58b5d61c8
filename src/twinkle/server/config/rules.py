"""What must hold between the sections of a configuration. Each rule looks at valid sections only.

Most of them say what the embedded runtime, one process on one device, cannot do.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twinkle.errors import InvalidInputError, UserError
from twinkle.hub import parse_model_id
from twinkle.server.config.applications import ApplicationSpec, ModelArgs, SamplerArgs, ServerArgs
from twinkle.server.config.placement import DeviceGroup, DeviceMesh
from twinkle.server.config.sampler_process import has_own_process
from twinkle.server.config.sections import AuthConfig, HttpOptions
from twinkle.server.config.serving import GATEWAY_PREFIX, PROCESSOR_PREFIX, is_path, served_models

__all__ = ["Broken", "application_rules", "network_rules"]

Location = tuple[str | int, ...]
Applications = Sequence[ApplicationSpec]

_ONE_DEVICE = "1 (more processes or devices need runtime: ray)"
_ONE_ENGINE = "a sampler has one engine for each replica of its model (more: num_replicas of the model)"
_SAMPLERS_OF_BACKEND = {"transformers": ("torch", "vllm"), "megatron": ("vllm",), "mock": ("mock",)}
_ONLY_FOR_VLLM = ("engine_args", "memory_dir")
_NOT_FOR_MOCK = ("dtype", "device", "compiled", "memory_budget_gib")


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold, at the key that is easiest to change."""

    location: Location
    value: object
    allowed: str


def network_rules(http: HttpOptions, auth: AuthConfig) -> list[Broken]:
    """An open server is for this machine only."""
    if auth.mode == "keys" or auth.allow_open_on_network or http.is_loopback:
        return []
    allowed = (
        "localhost, 127.0.0.0/8 or ::1 while auth.mode is open; to listen here set auth.mode: keys and create keys, "
        "or, where everybody who reaches the server may use it, auth.allow_open_on_network: true"
    )
    return [Broken(("http_options", "host"), http.host, allowed)]


def application_rules(applications: Applications, runtime: str = "embedded") -> list[Broken]:
    """All that is wrong with the applications taken together."""
    on_ray = runtime == "ray"
    rules: list[Callable[[Applications], Iterator[Broken]]] = [
        _one_processor,
        _names_differ,
        _one_application_a_model,
        _routes,
        _groups_of_processes if on_ray else _one_device,
        _model_ids,
        _mock_computes_nothing,
        _samplers_have_their_model,
        _one_engine_a_sampler if on_ray else _samplers_share_devices,
        _model_names_differ,
        _supported_models_exist,
    ]
    return [broken for rule in rules for broken in rule(applications)]


def _one_processor(applications: Applications) -> Iterator[Broken]:
    found = [index for index, application in enumerate(applications) if application.import_path == "processor"]
    for index in found[1:]:
        yield Broken(("applications", index, "import_path"), "processor", "one processor application")


def _names_differ(applications: Applications) -> Iterator[Broken]:
    seen: set[str] = set()
    for index, application in enumerate(applications):
        if application.name in seen:
            yield Broken(("applications", index, "name"), application.name, "a name that no other application has")
        seen.add(application.name)


def _one_application_a_model(applications: Applications) -> Iterator[Broken]:
    seen: set[tuple[str, str]] = set()
    for index, application in enumerate(applications):
        args = application.args
        if isinstance(args, ServerArgs) and ("server", "") in seen:
            yield Broken(("applications", index, "import_path"), "server", "one server application")
        if isinstance(args, ModelArgs | SamplerArgs) and (application.import_path, args.model_id) in seen:
            more = "deployments[0].num_replicas on runtime: ray makes more"
            allowed = f"one {application.import_path} application for each model_id ({more})"
            yield Broken(("applications", index, "args", "model_id"), args.model_id, allowed)
        seen.add((application.import_path, args.model_id if isinstance(args, ModelArgs | SamplerArgs) else ""))


def _routes(applications: Applications) -> Iterator[Broken]:
    for index, application in enumerate(applications):
        route, kind = application.route_prefix, application.import_path
        fixed = {"server": GATEWAY_PREFIX, "processor": PROCESSOR_PREFIX}.get(kind)
        prefix = f"{GATEWAY_PREFIX}/{kind}/"
        wrong = route != fixed if fixed is not None else route is not None and not route.startswith(prefix)
        if route is not None and wrong:
            allowed = f"null or {fixed or prefix + 'NAME'}"
            yield Broken(("applications", index, "route_prefix"), route, allowed)


def _one_device(applications: Applications) -> Iterator[Broken]:
    for index, application in enumerate(applications):
        args, at = application.args, ("applications", index, "args")
        if not isinstance(args, ModelArgs | SamplerArgs):
            continue
        if args.nproc_per_node > 1:
            yield Broken((*at, "nproc_per_node"), args.nproc_per_node, _ONE_DEVICE)
        if args.device_group is not None:
            yield from _one_in_group(args.device_group, (*at, "device_group"))
        if args.device_mesh is not None:
            yield from _one_in_mesh(args.device_mesh, (*at, "device_mesh"))


def _groups_of_processes(applications: Applications) -> Iterator[Broken]:
    """Of a model on Ray: data parallel and sharded."""
    for index, application in enumerate(applications):
        args, at = application.args, ("applications", index, "args")
        if not isinstance(args, ModelArgs) or args.processes == 1 or args.backend == "megatron":
            continue  # how Megatron divides a model is for its backend to check, once there is one
        if args.backend == "mock":
            yield Broken((*at, "device_group"), args.processes, "1 process for a model with backend: mock")
        if args.device_group is not None and args.device_group.processes != args.processes:
            allowed = f"{args.processes}, as many as device_mesh or nproc_per_node has"
            yield Broken((*at, "device_group", "ranks"), args.device_group.ranks, allowed)
        mesh = args.device_mesh
        for key in () if mesh is None else mesh.larger_than_one():
            if key not in ("world_size", "dp_size", "fsdp_size", "mesh"):
                value = mesh.model_dump(mode="json")[key] if mesh is not None else None
                yield Broken((*at, "device_mesh", key), value, "1: training is spread by dp_size and fsdp_size")


def _one_in_group(group: DeviceGroup, at: Location) -> Iterator[Broken]:
    if group.processes > 1:
        yield Broken((*at, "ranks"), group.ranks, _ONE_DEVICE)
    if group.gpus_per_worker > 1:
        yield Broken((*at, "gpus_per_worker"), group.gpus_per_worker, _ONE_DEVICE)
    if group.visible_count > 1:
        yield Broken((*at, "visible_devices"), group.visible_devices, "one device (more need runtime: ray)")


def _one_in_mesh(mesh: DeviceMesh, at: Location) -> Iterator[Broken]:
    values = mesh.model_dump(mode="json")
    for key in mesh.larger_than_one():
        yield Broken((*at, key), values[key], _ONE_DEVICE if key != "mesh" else "one rank")


def _model_ids(applications: Applications) -> Iterator[Broken]:
    for index, application in enumerate(applications):
        args = application.args
        if not isinstance(args, ModelArgs) or args.backend == "mock" or is_path(args.model_id):
            continue
        try:
            parse_model_id(args.model_id)
        except UserError as error:
            allowed = error.allowed if isinstance(error, InvalidInputError) else f"a model that exists ({error})"
            yield Broken(("applications", index, "args", "model_id"), args.model_id, allowed)


def _mock_computes_nothing(applications: Applications) -> Iterator[Broken]:
    for index, application in enumerate(applications):
        if isinstance(application.args, ModelArgs) and application.args.backend == "mock":
            values = application.args.model_dump()
            for key in _NOT_FOR_MOCK:
                if values[key] not in (None, False):
                    allowed = "nothing with backend: mock, which has no use for it"
                    yield Broken(("applications", index, "args", key), values[key], allowed)


def _samplers_have_their_model(applications: Applications) -> Iterator[Broken]:
    models = {one.args.model_id: one.args for one in applications if isinstance(one.args, ModelArgs)}
    for index, application in enumerate(applications):
        if isinstance(application.args, SamplerArgs):
            yield from _sampler_rules(application.args, models, ("applications", index, "args"))


def _sampler_rules(sampler: SamplerArgs, models: dict[str, ModelArgs], at: Location) -> Iterator[Broken]:
    values = sampler.model_dump()
    for key in _ONLY_FOR_VLLM:
        if sampler.sampler_type != "vllm" and values[key]:
            yield Broken((*at, key), values[key], "nothing: it is for sampler_type: vllm")
    model = models.get(sampler.model_id)
    if model is None:
        known = ", ".join(models) or "none is configured"
        allowed = f"the model_id of a model application, which sampling needs for now: {known}"
        yield Broken((*at, "model_id"), sampler.model_id, allowed)
        return
    matching = _SAMPLERS_OF_BACKEND[model.backend]
    if sampler.sampler_type not in matching:
        allowed = f"{' or '.join(matching)}, as the model's backend is {model.backend}"
        yield Broken((*at, "sampler_type"), sampler.sampler_type, allowed)


def _samplers_share_devices(applications: Applications) -> Iterator[Broken]:
    """All of them, as in one process."""
    for index, sampler, model in _samplers(applications):
        yield from _shares_device(sampler, model, ("applications", index, "args"))


def _one_engine_a_sampler(applications: Applications) -> Iterator[Broken]:
    """On Ray: one for each replica of the model, in its process or apart. What Megatron needs is for later."""
    for index, sampler, model in _samplers(applications):
        at = ("applications", index, "args")
        if model.backend == "megatron":
            continue
        apart = has_own_process(applications[index], model)
        if not apart:
            yield from _shares_device(sampler, model, at)
        if sampler.nproc_per_node > 1:
            yield Broken((*at, "nproc_per_node"), sampler.nproc_per_node, f"1: {_ONE_ENGINE}")
        most = 1 if sampler.device_group is None else sampler.device_group.gpus_per_worker
        if most > 1 and not (apart and sampler.sampler_type == "vllm"):
            allowed = "1 (more are for vLLM with a device_group of its own)"
            yield Broken((*at, "device_group", "gpus_per_worker"), most, allowed)
        yield from _one_engine(sampler, most, at)
        names = {one.device_group.name for one in (sampler, model) if one.device_group is not None}
        if model.processes > 1 and sampler.device_group and model.device_group and len(names) == 1:
            allowed = "a group that is not the model's, whose processes train"
            yield Broken((*at, "device_group", "name"), sampler.device_group.name, allowed)


def _one_engine(sampler: SamplerArgs, gpus: int, at: Location) -> Iterator[Broken]:
    group, mesh = sampler.device_group, sampler.device_mesh
    if group is not None and group.processes not in (1, gpus):
        yield Broken((*at, "device_group", "ranks"), group.ranks, f"{gpus}, as gpus_per_worker: {_ONE_ENGINE}")
    for key in () if mesh is None else mesh.larger_than_one():
        value = mesh.model_dump(mode="json")[key] if mesh is not None else None
        if key not in ("world_size", "tp_size") or value != gpus:
            allowed = f"{gpus}, as gpus_per_worker" if key in ("world_size", "tp_size") else "1"
            yield Broken((*at, "device_mesh", key), value, f"{allowed}: {_ONE_ENGINE}")


def _samplers(applications: Applications) -> Iterator[tuple[int, SamplerArgs, ModelArgs]]:
    """Those that have a model, each with it."""
    models = {one.args.model_id: one.args for one in applications if isinstance(one.args, ModelArgs)}
    for index, application in enumerate(applications):
        if isinstance(application.args, SamplerArgs) and application.args.model_id in models:
            yield index, application.args, models[application.args.model_id]


def _shares_device(sampler: SamplerArgs, model: ModelArgs, at: Location) -> Iterator[Broken]:
    wanted = sampler.device_group.device if sampler.device_group else None
    if wanted is not None and model.backend != "mock" and model.compute_device not in (None, wanted):
        yield Broken((*at, "device_group"), wanted, f"the device of the model: {model.compute_device}")


def _model_names_differ(applications: Applications) -> Iterator[Broken]:
    indices = [index for index, one in enumerate(applications) if isinstance(one.args, ModelArgs)]
    served = served_models(applications)
    if len({one.model.model_id for one in served}) < len(served):
        return  # reported by its own rule
    uses = Counter(name for one in served for name in one.names)
    for index, one in zip(indices, served, strict=True):
        for name in one.names:
            if uses[name] > 1:
                allowed = "names (model_id, aliases, end of route_prefix) that no other model has"
                yield Broken(("applications", index, "args", "aliases"), name, allowed)


def _supported_models_exist(applications: Applications) -> Iterator[Broken]:
    known = dict.fromkeys(name for one in served_models(applications) for name in one.names)
    for index, application in enumerate(applications):
        if isinstance(application.args, ServerArgs):
            for name in application.args.supported_models or ():
                if name not in known:
                    allowed = f"names of the model applications: {', '.join(known) or 'none is configured'}"
                    yield Broken(("applications", index, "args", "supported_models"), name, allowed)
