"""The sizes of a Megatron model's mesh, and which models it can hold.

This module imports neither torch nor megatron-core: a server's configuration is checked with it, also on machines that
have none of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh

__all__ = [
    "FAMILIES",
    "ONE_PROCESS",
    "MeshSizes",
    "ModelCounts",
    "check_compilable",
    "check_counts",
    "check_family",
    "check_uncut_layers",
    "divisors",
    "family_name",
    "find_refused_sizes",
    "read_sizes",
]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5", "qwen3_moe")  # see family_name
_UNCUT = {"qwen3_5": "layers with linear attention"}  # families with layers that tensor parallelism does not divide


@dataclass(frozen=True)
class MeshSizes:
    """How many processes each kind of parallelism has. ``ep`` uses the processes of tp and dp, and adds none."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        sizes = f"dp_size={self.dp}, tp_size={self.tp}, pp_size={self.pp}"
        return sizes if self.ep == 1 else f"{sizes}, ep_size={self.ep}"


ONE_PROCESS = MeshSizes()


@dataclass(frozen=True)
class ModelCounts:
    """What a mesh divides in a model. ``intermediate``: the features of layers without experts; None: all have some.

    ``experts``: of a layer; None: the model has none.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    intermediate: int | None
    experts: int | None


@dataclass(frozen=True)
class RefusedSize:
    """A size of a mesh that no Megatron model here can have. ``nearest``: the nearest mesh that works."""

    key: str
    size: int
    reason: str
    nearest: MeshSizes


def find_refused_sizes(mesh: DeviceMesh) -> list[RefusedSize]:
    """Return the sizes of a mesh that are not supported, whatever the model is."""
    sizes = _given_sizes(mesh)
    nearest = replace(sizes, dp=mesh.world_size // (sizes.tp * sizes.pp))
    given = {
        "cp_size": (mesh.cp_world_size, "context parallelism needs Transformer Engine"),
        "fsdp_size": (mesh.fsdp_world_size, "a Megatron model is cut by tp_size and pp_size"),
        "ulysses_size": (mesh.ulysses_size, "sequence_parallel=True divides tokens among tp"),
        "vpp_size": (mesh.vpp_size, "a process runs one stage of the pipeline"),
        "etp_size": (mesh.etp_size, "experts are spread by ep_size, each is whole"),
    }
    asked = [(key, size or 1, reason) for key, (size, reason) in given.items()]
    return [RefusedSize(key, size, reason, nearest) for key, size, reason in asked if size > 1]


def read_sizes(mesh: DeviceMesh) -> MeshSizes:
    """Return the sizes of a mesh; raise for what no Megatron model here can do, with the nearest mesh that works."""
    sizes = _given_sizes(mesh)
    for refused in find_refused_sizes(mesh):
        raise UnsupportedError(
            f"device_mesh: {refused.key}={refused.size}: {refused.reason}; the nearest mesh that works: "
            f"{refused.nearest}"
        )
    if mesh.has_dim("ep") or mesh.has_dim("ep_fsdp"):
        nearest = replace(sizes, dp=mesh.world_size // (sizes.tp * sizes.pp))
        raise UnsupportedError(
            "device_mesh: ep is no dimension of its own: ep_size divides experts among the ranks of tp and dp; the "
            f"nearest mesh that works: {nearest}"
        )
    if sizes.dp * sizes.tp % sizes.ep:
        allowed = divisors([sizes.dp * sizes.tp])
        raise InvalidInputError("ep_size", sizes.ep, f"{allowed}, which divide dp × tp = {sizes.dp * sizes.tp}")
    _check_order(mesh)
    return sizes


def _given_sizes(mesh: DeviceMesh) -> MeshSizes:
    given = {name: max(1, mesh.get_dim_size(name)) if mesh.has_dim(name) else 1 for name in ("dp", "tp", "pp")}
    return MeshSizes(given["dp"], given["tp"], given["pp"], mesh.ep_size or 1)


def divisors(numbers: Iterable[int]) -> str:
    """Return the common divisors of some numbers as text: the sizes that divide all of them."""
    counted = list(numbers)
    common = [size for size in range(1, min(counted) + 1) if all(number % size == 0 for number in counted)]
    return " or ".join(map(str, common))


def _check_order(mesh: DeviceMesh) -> None:
    """Raise unless ranks are numbered as Megatron numbers them: tp varies fastest, then dp, then pp."""
    names = [name for name in ("pp", "dp", "tp") if mesh.has_dim(name)]
    ranks = np.array(mesh.ranks_along(names)).reshape(-1) if names else mesh.mesh.reshape(-1)
    if ranks.tolist() != list(range(mesh.world_size)):
        allowed = "ranks from 0 on, numbered along tp first, then dp, then pp, as DeviceMesh.from_sizes does it"
        raise InvalidInputError("device_mesh.mesh", mesh.mesh.tolist(), allowed)


def family_name(model_type: str) -> str:
    """Return the family of a model by its model_type in config.json. A decoder has that of its model with a tower."""
    return model_type.removesuffix("_text")


def check_family(family: str) -> None:
    """Raise UnsupportedError for a family of models that is not supported."""
    if family not in FAMILIES:
        raise UnsupportedError(f"{family}: the Megatron backend supports the families {', '.join(FAMILIES)}")


def check_uncut_layers(family: str, sizes: MeshSizes) -> None:
    """Raise for tensor parallelism of a family that has layers which it does not divide."""
    if family in _UNCUT and sizes.tp > 1:
        nearest = MeshSizes(dp=sizes.dp * sizes.tp, pp=sizes.pp)
        allowed = f"1: {family} has {_UNCUT[family]}, which are not cut; the nearest mesh that works: {nearest}"
        raise InvalidInputError("tp_size", sizes.tp, allowed)


def check_counts(counts: ModelCounts, sizes: MeshSizes) -> None:
    """Raise for a mesh that cannot hold this model, with the sizes that work."""
    check_uncut_layers(counts.family, sizes)
    cut = {"attention heads": counts.heads, "key-value heads": counts.kv_heads}
    if counts.intermediate is not None:
        cut["intermediate features"] = counts.intermediate
    _require_divisor("tp_size", sizes.tp, cut)
    _require_divisor("pp_size", sizes.pp, {"layers": counts.layers})
    if counts.experts is not None:
        _require_divisor("ep_size", sizes.ep, {"experts": counts.experts})
    elif sizes.ep > 1:
        raise InvalidInputError("ep_size", sizes.ep, f"1: {counts.family} has no experts")


def _require_divisor(field: str, size: int, counts: Mapping[str, int]) -> None:
    if any(count % size for count in counts.values()):
        text = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise InvalidInputError(field, size, f"{divisors(counts.values())}, which divide its {text}")


def check_compilable(sizes: MeshSizes) -> None:
    """Raise UnsupportedError if the layers communicate, because then they cannot be compiled."""
    if sizes.tp > 1 or sizes.ep > 1:
        raise UnsupportedError(f"compiled: got True with {sizes}, allowed: False, because its layers communicate")
