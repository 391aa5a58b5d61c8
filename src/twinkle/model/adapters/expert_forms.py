"""Adapters on experts in the forms that files have, and their conversion into the forms that we train.

Of each layer's experts a file has one of

    experts.w1.lora_A.weight               Tinker's form, three dimensions: gate (w1), up (w3) and down (w2). The first
                                           dimension is that of experts; it is 1 where all experts share the factor
    experts.7.gate_proj.lora_A.weight      two dimensions for each expert: vLLM, and PEFT on separate experts
    experts.base_layer.lora_A.weight and   PEFT's ``target_parameters``: gate and up as one projection (base_layer), and
    experts.lora_A.weight                  down; all experts in one tensor of two dimensions

All functions take and return the contents of adapter_config.json, and tensors by name. ``alternating``: the rows of
gate and up stand in turns in the model's weights, as in gpt-oss, and so they do where gate and up are one projection of
a file. In other families the gate's rows come first. In memory they always do.
:mod:`twinkle.model.adapters.expert_exports` writes the forms.

Shapes: E experts, R rank, I inputs, O outputs.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinkle.errors import CheckpointError
from twinkle.model.adapters.peft_config import misread_modules, spec_from_peft
from twinkle.model.types import LoraSpec, name_in_decoder, text_name

Config = dict[str, object]
Tensors = dict[str, Tensor]

FRONT = "base_model.model."
PROJECTIONS = ("w1", "w2", "w3")
_EACH = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "w1": "w1", "w2": "w2", "w3": "w3"}
_END = r"\.lora_(?P<factor>[AB])\.weight"
_TINKER = re.compile(rf"(?P<experts>.*\.experts)\.(?P<projection>w[123]){_END}")
_SEPARATE = re.compile(rf"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>{'|'.join(_EACH)}){_END}")
_JOINED = re.compile(rf"(?P<experts>.*\.experts)(?P<inner>\.base_layer)?{_END}")
_HEAD = (f"{FRONT}model.unembed_tokens.", f"{FRONT}lm_head.")  # Tinker's name and ours


@dataclass(frozen=True)
class Projection:
    """The A and B of all experts on one projection. The first dimension is 1 where all experts share the factor."""

    a_ERI: Tensor
    b_EOR: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a_ERI.shape[1]

    @property
    def count(self) -> int:
        """Return the number of experts."""
        return max(len(self.a_ERI), len(self.b_EOR))

    @property
    def scaled_b(self) -> Tensor:
        return self.b_EOR * self.scaling


# The experts of one layer: by w1, w2 and w3, or by gate_up and w2 where gate and up are one projection.
Layer = dict[str, Projection]


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter on experts, apart from the form of its file. ``layers``: the experts, by the names of their modules.

    ``spec`` is that of the file, with whose names it gives the ``others``, the tensors on linear layers, their ranks.
    """

    config: Config
    spec: LoraSpec
    layers: dict[str, Layer]
    others: Tensors
    alternating: bool = False

    @property
    def linear(self) -> list[str]:
        """Return the names of the linear layers."""
        return sorted({name.rpartition(".lora_")[0].removeprefix(FRONT) for name in self.others})


def has_experts(names: Iterable[str]) -> bool:
    """Return whether an adapter whose tensors have these names is on experts."""
    return any(pattern.fullmatch(name) for name in names for pattern in (_TINKER, _SEPARATE, _JOINED))


def is_ours(config: Mapping[str, object], shapes: Mapping[str, Collection[int]]) -> bool:
    """Return whether a file with tensors of these shapes can be loaded as it is, without :func:`for_training`."""
    names = shapes.keys()
    if any(name.startswith(_HEAD[0]) or 0 in shape for name, shape in shapes.items()):
        return False
    if any(map(_SEPARATE.fullmatch, names)):
        return False
    if any(map(_JOINED.fullmatch, names)):
        return bool(config.get("target_parameters"))
    found = [(match, shapes[name]) for name in names if (match := _TINKER.fullmatch(name))]
    shared = all(
        tuple(shape)[:1] == (1,) for match, shape in found if (match["projection"] == "w2") == (match["factor"] == "B")
    )
    return not found or (shared and not isinstance(config.get("target_modules"), str))


def for_training(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    shared_outer: bool | None = None,
    *,
    alternating: bool = False,
) -> tuple[Config, Tensors]:
    """Return an adapter in one of the forms that we train: Tinker's with shared factors, or PEFT's.

    ``shared_outer``: which one. None: PEFT's if the file is in that form; else Tinker's if the experts share the
    factors; else PEFT's, with twice the rank for gate and up if their A differ, as PEFT itself converts such files.
    """
    tensors = {_our_head(name): each for name, each in tensors.items() if 0 not in each.shape}
    if not has_experts(tensors):
        return dict(config), tensors
    adapter = read(config, tensors, alternating=alternating)
    if shared_outer is None:
        in_one = any(map(_JOINED.fullmatch, tensors))
        shared_outer = not in_one and all(map(_is_shared, adapter.layers.values()))
    return as_tinker(adapter, must_share=True) if shared_outer else as_peft(adapter)


def read(config: Mapping[str, object], tensors: Mapping[str, Tensor], *, alternating: bool = False) -> ReadAdapter:
    """Read an adapter in any of the forms. CheckpointError: it is in none; the error names the tensor."""
    spec = spec_from_peft({**config, "init_lora_weights": True, **_any_module(config)})
    found: dict[str, dict[tuple[str, str], dict[int | None, Tensor]]] = {}
    others: Tensors = {}
    for name, tensor in tensors.items():
        match = _TINKER.fullmatch(name) or _SEPARATE.fullmatch(name) or _JOINED.fullmatch(name)
        if match is None:
            if ".experts." in name:
                raise CheckpointError(f"{name}: no name of a factor on experts that we know")
            others[name] = tensor
            continue
        parts = match.groupdict()
        wanted = 3 if match.re is _TINKER else 2
        if tensor.dim() != wanted:
            raise CheckpointError(f"{name}: got {tensor.dim()} dimensions, expected {wanted}")
        projection = _projection(parts, config, tensors)
        expert = int(parts["expert"]) if "expert" in parts else None
        place = parts["experts"].replace(".block_sparse_moe.", ".mlp.")  # Mixtral's, before Transformers 5
        found.setdefault(place, {}).setdefault((projection, parts["factor"]), {})[expert] = tensor
    layers = {name: _layer(name, factors, spec) for name, factors in found.items()}
    for name, layer in layers.items():
        _check(name, layer)
        if alternating and "gate_up" in layer:
            layer["gate_up"] = _gate_first(layer["gate_up"])
    return ReadAdapter(dict(config), spec, layers, others, alternating)


def _gate_first(each: Projection) -> Projection:
    return replace(each, b_EOR=torch.cat([each.b_EOR[:, 0::2], each.b_EOR[:, 1::2]], 1))


def in_file(gate_up: Projection, *, alternating: bool) -> Projection:
    """Return gate and up with their rows in the order that a file has."""
    if not alternating:
        return gate_up
    gate, up = gate_up.b_EOR.chunk(2, 1)
    return replace(gate_up, b_EOR=torch.stack([gate, up], 2).flatten(1, 2))


def _our_head(name: str) -> str:
    return name.replace(*_HEAD) if name.startswith(_HEAD[0]) else name


def _any_module(config: Mapping[str, object]) -> Config:
    """Return target modules for a file that names none: only its tensors say what it is on."""
    given = config.get("target_modules")
    return {} if given or config.get("target_parameters") else {"target_modules": ["experts"]}


def _projection(parts: Mapping[str, str | None], config: Mapping[str, object], names: Collection[str]) -> str:
    """Return the projection that a tensor's name means."""
    named = parts.get("projection")
    if named is not None:
        return _EACH[named]
    if parts["inner"]:
        return "gate_up"
    alone = f"{parts['experts']}.base_layer.lora_A.weight" not in names
    parameters = config.get("target_parameters") or ()
    assert isinstance(parameters, Iterable), "spec_from_peft has checked it"
    ends = {str(each).rpartition(".")[2] for each in parameters}
    return "gate_up" if alone and "gate_up_proj" in ends and "down_proj" not in ends else "w2"


def _layer(name: str, factors: Mapping[tuple[str, str], Mapping[int | None, Tensor]], spec: LoraSpec) -> Layer:
    layer: Layer = {}
    for projection in sorted({projection for projection, _ in factors}):
        a, b = (factors.get((projection, factor)) for factor in "AB")
        if a is None or b is None:
            raise CheckpointError(f"{name}: {projection} has no lora_{'A' if a is None else 'B'}")
        if (None in a) is not (None in b) or (None in a and len(a) + len(b) > 2):
            raise CheckpointError(f"{name}: {projection} has tensors of single experts beside tensors of all experts")
        if None not in a:
            layer[projection] = _stacked(name, projection, a, b, spec)
        elif a[None].dim() == 3:
            (scaling,) = spec.module_scalings([_module(f"{name}.{projection}")])
            layer[projection] = Projection(a[None], b[None], scaling)
        else:
            parameter = _module(f"{name}.{'down_proj' if projection == 'w2' else 'gate_up_proj'}")
            (rank,), (scaling,) = spec.module_ranks([parameter]), spec.module_scalings([parameter])
            count, rest = divmod(len(a[None]), rank)
            if rest or b[None].shape[1] != len(a[None]):
                raise CheckpointError(
                    f"{name}.lora_A, lora_B: got {tuple(a[None].shape)} and {tuple(b[None].shape)} for {parameter}, "
                    f"expected multiples of its rank, {rank}"
                )
            b_EOR = b[None].unflatten(1, (rank, count)).permute(2, 0, 1)
            layer[projection] = Projection(a[None].unflatten(0, (count, rank)), b_EOR, scaling)
    return layer


def _check(name: str, layer: Layer) -> None:
    """Raise if the factors of a layer's experts do not fit together; the error names the tensors."""
    count = max(each.count for each in layer.values())
    for projection, each in layer.items():
        a, b = tuple(each.a_ERI.shape), tuple(each.b_EOR.shape)
        if a[0] not in (1, count) or b[0] not in (1, count) or a[1] != b[2]:
            raise CheckpointError(
                f"{name}: {projection} has lora_A {a} and lora_B {b}; expected ({count} or 1 experts, rank, in) and "
                f"({count} or 1 experts, out, rank)"
            )
    if "gate_up" not in layer and ("w1" in layer) != ("w3" in layer):
        raise CheckpointError(f"{name}: it has one of gate and up; expected both, or none")


def _stacked(
    name: str, projection: str, a: Mapping[int | None, Tensor], b: Mapping[int | None, Tensor], spec: LoraSpec
) -> Projection:
    """Return a projection of experts that have a tensor each."""
    count = len(a)
    written = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[projection]
    for factor, tensors in (("A", a), ("B", b)):
        for expert in range(count):
            if expert not in tensors:
                raise CheckpointError(f"{name}.{expert}.{written}.lora_{factor}.weight is missing")
            if tensors[expert].shape != tensors[0].shape:
                raise CheckpointError(
                    f"{name}.{expert}.{written}.lora_{factor}.weight: got {tuple(tensors[expert].shape)}, "
                    f"expected {tuple(tensors[0].shape)} as that of expert 0"
                )
    scalings = set(spec.module_scalings([_module(f"{name}.{expert}.{written}") for expert in range(count)]))
    if len(scalings) > 1:
        raise CheckpointError(f"rank_pattern, alpha_pattern: {name} has experts of different scalings; expected one")
    a_ERI, b_EOR = (torch.stack([each[expert] for expert in range(count)]) for each in (a, b))
    return Projection(a_ERI, b_EOR, scalings.pop())


def _module(name: str) -> str:
    return name.removeprefix(FRONT)


# --- the two forms that we train --------------------------------------------------------------------------------------


def _first(tensor: Tensor) -> Tensor | None:
    """Return what all experts share, with a first dimension of 1; None if they do not share it."""
    return tensor[:1] if bool((tensor == tensor[:1]).all()) else None


def _is_shared(layer: Layer) -> bool:
    return "gate_up" not in layer and all(
        _first(each.b_EOR if projection == "w2" else each.a_ERI) is not None for projection, each in layer.items()
    )


def as_tinker(adapter: ReadAdapter, *, must_share: bool = False) -> tuple[Config, Tensors]:
    """Return an adapter in Tinker's form, with the factors that Tinker shares as one, if the experts share them.

    CheckpointError if they do not, and ``must_share``.
    """
    tensors, ranks, scalings = dict(adapter.others), *_of_linear(adapter)
    for name, layer in adapter.layers.items():
        for projection, each in apart(layer).items():
            factors = {"A": each.a_ERI, "B": each.b_EOR}
            outer = "B" if projection == "w2" else "A"
            shared = _first(factors[outer])
            if shared is None and must_share:
                raise CheckpointError(
                    f"{name}.{projection}.lora_{outer}: experts have different ones; an adapter of "
                    "experts='shared_outer' has one"
                )
            factors[outer] = factors[outer] if shared is None else shared
            for factor, tensor in factors.items():
                copied = tensor.clone(memory_format=torch.contiguous_format)  # gate and up may have the same A
                tensors[f"{name}.{projection}.lora_{factor}.weight"] = copied
            module = _module(f"{name}.{projection}")
            ranks[module], scalings[module] = each.rank, each.scaling
    on_experts = [name_in_decoder(name) for name in ranks if name.rpartition(".")[2] in PROJECTIONS]
    modules = sorted([*modules_of(adapter), *on_experts])
    return {**_with_patterns(adapter, ranks, scalings), "target_modules": modules}, tensors


def as_peft(adapter: ReadAdapter) -> tuple[Config, Tensors]:
    """Return an adapter in PEFT's form. Where gate and up have an A each, both stand in one of the sum of the ranks."""
    tensors, ranks, scalings = dict(adapter.others), *_of_linear(adapter)
    parameters: list[str] = []
    for name, layer in adapter.layers.items():
        joint = joined(layer)
        for projection, parameter in (("gate_up", "gate_up_proj"), ("w2", "down_proj")):
            if projection in joint:
                each, module = joint[projection], _module(f"{name}.{parameter}")
                if projection == "gate_up":
                    each = in_file(each, alternating=adapter.alternating)
                inner = ".base_layer" if projection == "gate_up" and "w2" in joint else ""
                tensors |= flat(f"{name}{inner}", each.a_ERI, each.b_EOR)
                ranks[module], scalings[module] = each.rank, each.scaling
                parameters.append(module)
    misread = misread_modules(adapter.linear)
    modules = [name for name in modules_of(adapter) if name.rpartition(".")[2] not in _EACH]
    written = {re.split(r"\.layers\.\d+\.", name)[-1] for name in parameters}
    if len(parameters) != len(written) * len(adapter.layers):  # not the same in all layers
        written = {name_in_decoder(name) for name in parameters}
    return {
        **_with_patterns(adapter, ranks, scalings),
        "target_modules": modules,
        "target_parameters": sorted([*written, *(f"{name_in_decoder(name)}.weight" for name in misread)]),
    }, tensors


def joined(layer: Layer) -> Layer:
    """Return a layer with gate and up as one projection, for all experts, and down for all experts."""
    found = {name: each for name, each in layer.items() if name in ("gate_up", "w2")}
    if "w1" in layer:
        gate, up = layer["w1"], layer["w3"]
        count = max(gate.count, up.count)
        if gate.rank == up.rank and gate.scaling == up.scaling and torch.equal(gate.a_ERI, up.a_ERI):
            both = torch.cat([gate.b_EOR.expand(count, -1, -1), up.b_EOR.expand(count, -1, -1)], 1)
            found["gate_up"] = Projection(gate.a_ERI, both, gate.scaling)
        else:
            width = gate.b_EOR.shape[1]
            scaling = gate.scaling or up.scaling  # an alpha of 0 is allowed: then that one stays 0, in its B
            a_ERI = torch.cat([gate.a_ERI.expand(count, -1, -1), up.a_ERI.expand(count, -1, -1)], 1)
            b_EOR = gate.b_EOR.new_zeros(count, 2 * width, gate.rank + up.rank)
            b_EOR[:, :width, : gate.rank] = gate.b_EOR * (gate.scaling / scaling if scaling else 1.0)
            b_EOR[:, width:, gate.rank :] = up.b_EOR * (up.scaling / scaling if scaling else 1.0)
            found["gate_up"] = Projection(a_ERI, b_EOR, scaling)
    return {name: _for_all(each) for name, each in found.items()}


def _for_all(each: Projection) -> Projection:
    """Return a projection with a copy of each factor for each expert."""
    count = each.count
    return replace(each, a_ERI=each.a_ERI.expand(count, -1, -1), b_EOR=each.b_EOR.expand(count, -1, -1))


def apart(layer: Layer) -> Layer:
    """Return a layer with gate and up as two projections."""
    if "gate_up" not in layer:
        return layer
    both = layer["gate_up"]
    width, half = both.b_EOR.shape[1] // 2, both.rank // 2
    gate, up = both.b_EOR[:, :width], both.b_EOR[:, width:]
    down = {each: layer[each] for each in ("w2",) if each in layer}
    if both.rank % 2 == 0 and not gate[..., half:].any() and not up[..., :half].any():  # made of two, as above
        parts = (both.a_ERI[:, :half], gate[..., :half]), (both.a_ERI[:, half:], up[..., half:])
    else:
        parts = (both.a_ERI, gate), (both.a_ERI, up)
    return {**down, "w1": Projection(*parts[0], both.scaling), "w3": Projection(*parts[1], both.scaling)}


def flat(name: str, a_ERI: Tensor, b_EOR: Tensor) -> Tensors:
    """Return PEFT's two dimensions: A is ordered by expert, and B by rank first."""
    return {
        f"{name}.lora_A.weight": a_ERI.flatten(0, 1).contiguous(),
        f"{name}.lora_B.weight": b_EOR.permute(1, 2, 0).flatten(1).contiguous(),
    }


def is_tinkers(names: Iterable[str]) -> bool:
    """Return whether tensors of these names are on experts in Tinker's form."""
    return any(map(_TINKER.fullmatch, names))


# --- configurations ---------------------------------------------------------------------------------------------------


def modules_of(adapter: ReadAdapter) -> list[str]:
    """Return the target modules of an adapter's linear layers: as its configuration lists them, else full names."""
    given = adapter.config.get("target_modules")
    listed = (
        [] if isinstance(given, str) or not isinstance(given, Iterable) else [text_name(str(each)) for each in given]
    )
    full = {name: f".{text_name(name)}" for name in adapter.linear}
    kept = [each for each in listed if any(name.endswith(f".{each}") for name in full.values())]
    uncovered = [name for name, end in full.items() if not any(end.endswith(f".{each}") for each in kept)]
    return sorted({*kept, *map(name_in_decoder, uncovered)})


def _of_linear(adapter: ReadAdapter) -> tuple[dict[str, int], dict[str, float]]:
    """Return the ranks and the scalings of the linear layers."""
    names = adapter.linear
    spec = adapter.spec
    return (
        dict(zip(names, spec.module_ranks(names), strict=True)),
        dict(zip(names, spec.module_scalings(names), strict=True)),
    )


def _with_patterns(adapter: ReadAdapter, ranks: Mapping[str, int], scalings: Mapping[str, float]) -> Config:
    """Return the configuration with patterns for what modules have, without fields that choose modules."""
    spec = adapter.spec
    alphas = {name: scalings[name] * (math.sqrt(rank) if spec.use_rslora else rank) for name, rank in ranks.items()}
    config = {
        name: value
        for name, value in adapter.config.items()
        if name not in ("target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")
    }
    return {
        **config,
        "rank_pattern": _patterns(ranks, spec.rank),
        "alpha_pattern": _patterns(alphas, spec.alpha),
    }


def _patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Return patterns that give modules these values: by their places in a layer, if all layers have the same there."""
    by_place: dict[str, set[float]] = {}
    for name, value in values.items():
        by_place.setdefault(re.split(r"\.layers\.\d+\.", name)[-1], set()).add(value)
    patterns: dict[str, float] = {}
    for name, value in values.items():
        place = re.split(r"\.layers\.\d+\.", name)[-1]
        uniform = len(by_place[place]) == 1 and not any(
            other != place and other.endswith(f".{place}") for other in by_place
        )
        if not math.isclose(value, default):
            patterns[place if uniform else name_in_decoder(name).replace(".", r"\.")] = value
    return {name: int(value) if float(value).is_integer() else value for name, value in patterns.items()}
