"""The device mesh of a model as its configuration gives it, and what a Megatron model cannot have of it.

What the model's own config.json says about sizes is checked where the model is on this machine already; elsewhere it is
checked when the model is loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.hub.local_config import read_local_config
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.megatron.sizes import (
    FAMILIES,
    MeshSizes,
    ModelCounts,
    check_compilable,
    check_counts,
    check_uncut_layers,
    family_name,
    find_refused_sizes,
    read_sizes,
)
from twinkle.server.config.applications import ApplicationSpec, ModelArgs


def device_mesh(args: ModelArgs) -> DeviceMesh:
    """Return the configured mesh; without one, a data-parallel mesh of all processes of the model.

    InvalidInputError for sizes that contradict each other.
    """
    given, device = args.device_mesh, args.group_device
    if given is None:
        return DeviceMesh.from_sizes(dp_size=args.processes, device_type=device)
    if given.mesh is not None:
        return DeviceMesh(
            np.array(given.mesh),
            given.mesh_dim_names,
            ep_size=given.ep_size,
            etp_size=given.etp_size,
            vpp_size=given.vpp_size,
            ulysses_size=given.ulysses_size,
            sequence_parallel=given.sequence_parallel,
            device_type=device,
        )
    return DeviceMesh.from_sizes(
        world_size=given.world_size or 1,
        dp_size=given.dp_size,
        fsdp_size=given.fsdp_size,
        tp_size=given.tp_size,
        pp_size=given.pp_size,
        cp_size=given.cp_size,
        ulysses_size=given.ulysses_size,
        ep_size=given.ep_size,
        etp_size=given.etp_size,
        vpp_size=given.vpp_size,
        sequence_parallel=given.sequence_parallel,
        device_type=device,
    )


def describe_mesh(args: ModelArgs) -> str:
    """Return how a model is spread, for people: ``megatron, dp 1 × tp 2 × pp 2, 4 processes``."""
    if args.processes == 1:
        return f"{args.backend}, 1 process"
    mesh = device_mesh(args)
    sizes = {"dp": mesh.dp_world_size, "fsdp": mesh.fsdp_world_size, "tp": mesh.tp_world_size, "pp": mesh.pp_world_size}
    always = ("dp", "tp", "pp") if args.backend == "megatron" else ("dp",)
    parts = [f"{name} {max(1, size)}" for name, size in sizes.items() if size > 1 or name in always]
    more = [f"ep {mesh.ep_size}"] if (mesh.ep_size or 1) > 1 else []
    more += ["sequence parallel"] if args.backend == "megatron" and has_sequence_parallel(args) else []
    return ", ".join([args.backend, " × ".join(parts), *more, f"{args.processes} processes"])


def mesh_notes(applications: Sequence[ApplicationSpec]) -> list[str]:
    """Return how each model with several processes is spread."""
    return [
        f"applications[{index}].args: {describe_mesh(one.args)}"
        for index, one in enumerate(applications)
        if isinstance(one.args, ModelArgs) and one.args.processes > 1
    ]


def has_sequence_parallel(args: ModelArgs) -> bool:
    """Return whether tokens are divided among tensor parallel ranks because the configuration says so."""
    mesh = device_mesh(args)
    return mesh.sequence_parallel and mesh.tp_world_size > 1


# --- what a Megatron model cannot have --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshProblem:
    """A key of a model's arguments whose value is not allowed. ``key`` is its path under ``args``."""

    key: tuple[str, ...]
    value: object
    allowed: str


def find_mesh_problems(args: ModelArgs) -> Iterator[MeshProblem]:
    """Yield what is wrong with the mesh of a model with ``backend: megatron``, with the nearest sizes that work."""
    try:
        mesh = device_mesh(args)
    except InvalidInputError as error:
        yield _size_problem(args, error)
        return
    in_lists = args.device_mesh is not None and args.device_mesh.mesh is not None
    refused = find_refused_sizes(mesh)
    for each in refused:
        listed = in_lists and each.key in ("cp_size", "fsdp_size")
        key, value = ("mesh_dim_names", list(mesh.mesh_dim_names or ())) if listed else (each.key, each.size)
        allowed = f"{'no ' + each.key.removesuffix('_size') if listed else '1'}: {each.reason}"
        yield MeshProblem(("device_mesh", str(key)), value, f"{allowed}; {_nearest(each.nearest)}")
    sharded_experts = None if args.device_mesh is None else args.device_mesh.ep_fsdp_size
    if sharded_experts is not None and sharded_experts > 1:
        allowed = "1: experts are spread by ep_size, each is whole"
        yield MeshProblem(("device_mesh", "ep_fsdp_size"), sharded_experts, allowed)
    if not refused:
        yield from _find_size_problems(args, mesh)


def _find_size_problems(args: ModelArgs, mesh: DeviceMesh) -> Iterator[MeshProblem]:
    try:
        sizes = read_sizes(mesh)
    except InvalidInputError as error:
        yield _size_problem(args, error)
        return
    except UnsupportedError as error:
        allowed = str(error).removeprefix("device_mesh: ")
        yield MeshProblem(("device_mesh", "mesh_dim_names"), list(mesh.mesh_dim_names or ()), allowed)
        return
    if sizes.world != args.processes:
        allowed = f"{args.processes} processes, as many as device_group or nproc_per_node has"
        if args.processes % (sizes.tp * sizes.pp) == 0:
            allowed += f"; {_nearest(replace(sizes, dp=args.processes // (sizes.tp * sizes.pp)))}"
        yield MeshProblem(("device_mesh",), f"{sizes}, {sizes.world} processes", allowed)
    try:
        if args.compiled:
            check_compilable(sizes)
    except UnsupportedError as error:
        yield MeshProblem(("compiled",), True, str(error).partition("allowed: ")[2])
    if args.compiled and args.train_mode == "full":
        yield MeshProblem(("compiled",), True, "false with backend: megatron and train_mode: full")
    yield from _find_model_problems(args, sizes)


def _find_model_problems(args: ModelArgs, sizes: MeshSizes) -> Iterator[MeshProblem]:
    """Yield what a model that is on this machine already says against this mesh, or against Megatron."""
    config = read_local_config(args.model_id)
    if config is None:
        return
    family = family_name(str(config.get("model_type")))
    if family not in FAMILIES:
        allowed = f"a model of the families {', '.join(FAMILIES)} with backend: megatron (this one is of {family})"
        yield MeshProblem(("model_id",), args.model_id, allowed)
        return
    try:
        check_uncut_layers(family, sizes)
    except InvalidInputError as error:
        yield _size_problem(args, error)
        return
    counts = _read_counts(config.get("text_config") or config, family)
    if counts is None:
        return
    try:
        check_counts(counts, sizes)
    except InvalidInputError as error:
        yield _size_problem(args, error)


def _read_counts(config: Mapping[str, Any], family: str) -> ModelCounts | None:
    """Return what a mesh divides in a decoder; None if its file leaves something to the defaults of Transformers."""
    layers: Any = config.get("num_hidden_layers")
    heads: Any = config.get("num_attention_heads")
    kv_heads, intermediate = config.get("num_key_value_heads", heads), config.get("intermediate_size")
    has_experts = family == "qwen3_moe"
    experts = config.get("num_experts") if has_experts else None
    sizes = [layers, heads, kv_heads, intermediate, *([experts] if has_experts else [])]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    everywhere = has_experts and not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
    return ModelCounts(family, layers, heads, kv_heads, None if everywhere else intermediate, experts)


def _size_problem(args: ModelArgs, error: InvalidInputError) -> MeshProblem:
    """Return the problem of a size under the key that holds it: if the mesh is given by lists, that is ``mesh``."""
    key = error.field.removeprefix("device_mesh.")
    given = {} if args.device_mesh is None else args.device_mesh.model_dump(mode="json")
    if given.get(key) is not None:
        return MeshProblem(("device_mesh", key), given[key], error.allowed)
    dimension = key.removesuffix("_size")
    return MeshProblem(("device_mesh", "mesh"), given.get("mesh"), f"{dimension} of {error.allowed}")


def _nearest(sizes: MeshSizes) -> str:
    return f"the nearest mesh that works: {sizes}"
