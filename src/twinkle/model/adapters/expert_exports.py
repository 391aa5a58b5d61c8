"""Adapters in the forms that other programs read, which differ where adapters are on experts.

    tinker   as Tinker's archives have them: experts.w1, w2 and w3, three dimensions
    peft     as PEFT's ``target_parameters`` has them: two dimensions for all experts of a layer together
    vllm     two dimensions for each expert, for the families whose experts vLLM knows apart (Qwen3-MoE, Mixtral, OLMoE)
    vllm-3d  PEFT's tensors in one rank, for the families whose experts are one tensor in vLLM (Qwen3-VL-MoE, gpt-oss)

For vLLM the scaling is multiplied into B, all ranks are padded with zeros to the largest, and alpha is the rank: some
versions of vLLM ignore patterns.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from twinkle.errors import CheckpointError, InvalidInputError, UnsupportedError
from twinkle.model.adapters.expert_forms import (
    FRONT,
    Config,
    Layer,
    Projection,
    ReadAdapter,
    Tensors,
    apart,
    as_peft,
    as_tinker,
    flat,
    has_experts,
    in_file,
    is_ours,
    joined,
    modules_of,
    read,
)
from twinkle.model.adapters.linear_attention_forms import with_joint_projections
from twinkle.model.adapters.peft_config import NOTE
from twinkle.model.types import ADAPTER_FORMATS, tinker_name
from twinkle.model.weights.tensor_files import write_tensors

# The form that vLLM 0.24 reads for the experts of each family. Of other families it takes no adapters on experts.
VLLM_FORMS: Mapping[str, str] = {
    "deepseek_v2": "vllm",
    "deepseek_v3": "vllm",
    "gpt_oss": "vllm-3d",
    "mixtral": "vllm",
    "olmoe": "vllm",
    "qwen2_moe": "vllm",
    "qwen3_5_moe_text": "vllm-3d",
    "qwen3_moe": "vllm",
    "qwen3_vl_moe_text": "vllm-3d",
}
_WRITTEN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def convert(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], form: str, *, alternating: bool = False
) -> tuple[Config, Tensors]:
    """Return an adapter in the form of this name. ``alternating``: see :mod:`twinkle.model.adapters.expert_forms`.

    Adapters without experts have one form for all programs but Tinker's. Tinker's files of vision models have the names
    of the text model, those of gpt-oss another name for attention, and those of linear attention three projections,
    which are one for the others.
    """
    if form not in ADAPTER_FORMATS:
        raise InvalidInputError("format", form, f"one of {', '.join(ADAPTER_FORMATS)}")
    family = "gpt_oss" if alternating else ""  # the only family whose gate and up alternate
    if form == "tinker":
        tensors = {tinker_name(name, family): each for name, each in tensors.items()}
    elif alternating:
        tensors = {name.replace(".attn.", ".self_attn.", 1): each for name, each in tensors.items()}
    if form.startswith("vllm"):  # before all modules get one rank
        config, tensors = with_joint_projections(config, tensors)
    write = {"tinker": for_tinker, "peft": for_peft, "vllm": for_vllm, "vllm-3d": for_vllm_3d}
    written = write[form](config, tensors, alternating=alternating)
    return with_joint_projections(*written) if form == "peft" else written


def for_tinker(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, alternating: bool = False
) -> tuple[Config, Tensors]:
    """Return an adapter as Tinker's archives have it; one that has this form is returned as it is."""
    apart_already = not has_experts(tensors) or any(each.dim() == 3 for each in tensors.values())
    if apart_already and is_ours(config, {name: each.shape for name, each in tensors.items()}):
        return dict(config), dict(tensors)
    return as_tinker(read(config, tensors, alternating=alternating))


def for_peft(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, alternating: bool = False
) -> tuple[Config, Tensors]:
    """Return an adapter as PEFT reads it.

    PEFT has one A for gate and up together. Where they have an A each, both stand in one of twice the rank. Factors
    that experts share are copied for each.
    """
    if not has_experts(tensors):
        return dict(config), dict(tensors)
    return as_peft(read(config, tensors, alternating=alternating))


def for_vllm(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, alternating: bool = False
) -> tuple[Config, Tensors]:
    """Return an adapter with tensors of two dimensions for each expert, as vLLM reads it for most families."""
    if not has_experts(tensors):
        return dict(config), dict(tensors)
    adapter = read(config, tensors, alternating=alternating)
    layers = {name: apart(layer) for name, layer in adapter.layers.items()}
    rank = _largest(adapter, layers)
    written = _padded_linear(adapter, rank)
    for name, layer in layers.items():
        _require_all(name, layer)
        for projection, each in layer.items():
            a_ERI, b_EOR = (factor.expand(each.count, -1, -1) for factor in _padded(each, rank))
            for expert in range(each.count):
                front = f"{name}.{expert}.{_WRITTEN[projection]}"
                # copies: safetensors writes no tensors that share memory
                written[f"{front}.lora_A.weight"] = a_ERI[expert].clone()
                written[f"{front}.lora_B.weight"] = b_EOR[expert].clone()
    return _with_one_rank(adapter, rank), written


def for_vllm_3d(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, alternating: bool = False
) -> tuple[Config, Tensors]:
    """Return an adapter as vLLM reads it where experts are one tensor: PEFT's tensors in one rank."""
    if not has_experts(tensors):
        return dict(config), dict(tensors)
    adapter = read(config, tensors, alternating=alternating)
    layers = {name: joined(layer) for name, layer in adapter.layers.items()}
    rank = _largest(adapter, layers)
    written = _padded_linear(adapter, rank)
    for name, layer in layers.items():
        _require_all(name, layer)
        gate_up = in_file(layer["gate_up"], alternating=adapter.alternating)
        written |= flat(f"{name}.base_layer", *_padded(gate_up, rank))
        written |= flat(name, *_padded(layer["w2"], rank))
    return _with_one_rank(adapter, rank), written


def _require_all(name: str, layer: Layer) -> None:
    if not layer.keys() & {"w1", "gate_up"} or "w2" not in layer:
        raise UnsupportedError(f"{name}: vLLM needs adapters on gate, up and down of the experts, all or none")


def _largest(adapter: ReadAdapter, layers: Mapping[str, Layer]) -> int:
    ranks = [each.rank for layer in layers.values() for each in layer.values()]
    return max([*ranks, *adapter.spec.module_ranks(adapter.linear)])


def _padded(each: Projection, rank: int) -> tuple[Tensor, Tensor]:
    """Return A and B, with the scaling, of this rank: what is added is zero."""
    more = rank - each.rank
    return pad(each.a_ERI, (0, 0, 0, more)), pad(each.scaled_b, (0, more))


def _padded_linear(adapter: ReadAdapter, rank: int) -> Tensors:
    """Return the tensors on linear layers in one rank, with the scalings in B."""
    padded = {}
    modules = [name.rpartition(".lora_")[0].removeprefix(FRONT) for name in adapter.others]
    scalings = adapter.spec.module_scalings(modules)
    for (name, tensor), scaling in zip(adapter.others.items(), scalings, strict=True):
        if ".lora_A." in name:
            padded[name] = pad(tensor, (0, 0, 0, rank - tensor.shape[0]))
        else:
            padded[name] = pad(tensor * scaling, (0, rank - tensor.shape[1]))
    return padded


def _with_one_rank(adapter: ReadAdapter, rank: int) -> Config:
    config = {name: value for name, value in adapter.config.items() if name != "target_parameters"}
    return {
        **config,
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted([*modules_of(adapter), "experts"]),
    }


# --- folders ----------------------------------------------------------------------------------------------------------

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def convert_folder(source: Path, target: Path, form: str, *, alternating: bool = False) -> None:
    """Write the adapter in ``source``, in any form, to ``target``, an existing folder, in the form of this name.

    Its note on the output head is copied. The state of the optimizer is not: it has the form that the adapter has here.
    """
    for file in (_CONFIG, _WEIGHTS):
        if not (source / file).is_file():
            raise CheckpointError(f"{source} has no {file}: it is no adapter that can be written in another form")
    try:
        config, tensors = json.loads((source / _CONFIG).read_text()), load_file(source / _WEIGHTS)
    except (ValueError, RecursionError, OSError, SafetensorError) as error:
        raise CheckpointError(f"could not read {source}: {error}") from error
    config, tensors = convert(config, tensors, form, alternating=alternating)
    _write(target / _WEIGHTS, tensors)
    (target / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if (source / NOTE).is_file():
        shutil.copyfile(source / NOTE, target / NOTE)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors one at a time, so that a server answers meanwhile. Few files have tensors of several dtypes."""
    dtypes = {each.dtype for each in tensors.values()}
    if len(dtypes) > 1:
        save_file({name: each.contiguous() for name, each in tensors.items()}, path, {"format": "pt"})
    else:
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        write_tensors({path: shapes}, dtypes.pop() if dtypes else torch.float32, tensors.items())
