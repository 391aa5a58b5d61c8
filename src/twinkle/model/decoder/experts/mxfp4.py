"""Checkpoints whose experts are in mxfp4, as gpt-oss is published: read expert by expert into a model of full weights.

A number has four bits, two of them in a byte, the lower four bits first. 32 numbers in a row share a scale, a power of
two whose exponent is a byte, less 127. The checkpoint has ``gate_up_proj_blocks`` and ``gate_up_proj_scales`` in the
place of ``gate_up_proj``, and likewise for ``down_proj``, with the outputs first; the model has the inputs first.

The weights go to the model's device as they are read. Beside the model there is never more than one other tensor of the
checkpoint, or one expert's weights, in memory.

Shapes: O outputs, I inputs, G groups of 32 inputs, B the 16 bytes of a group.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from twinkle.errors import CheckpointError, UnsupportedError
from twinkle.utils.progress import Progress

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127
_BLOCKS, _SCALES = "_blocks", "_scales"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_GENERATION = "generation_config.json"


def is_mxfp4(config: PreTrainedConfig) -> bool:
    """Return whether the checkpoint that a configuration comes with has mxfp4 weights."""
    found = getattr(config, "quantization_config", None)
    return isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


def dequantized(blocks_OGB: Tensor, scales_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (I, O) that mxfp4 blocks and scales stand for."""
    nibbles = torch.stack([blocks_OGB & 0x0F, blocks_OGB >> 4], -1).flatten(2).int()
    values = torch.tensor(_VALUES, dtype=dtype, device=blocks_OGB.device)[nibbles]
    exponents = scales_OG.int() - _BIAS
    return torch.ldexp(values, exponents[..., None]).flatten(1).t()


def load_mxfp4(
    chosen: Any,
    config: PreTrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> PreTrainedModel:
    """Load a model from a folder with mxfp4 weights, as weights of ``dtype``.

    ``chosen``: the class that makes it, one of the library's Auto classes or a model class.
    """
    plain = deepcopy(config)
    del plain.quantization_config
    from_config = getattr(chosen, "from_config", None) or chosen._from_config
    with torch.device("meta"):
        model: PreTrainedModel = from_config(plain, dtype=dtype)
    with ExitStack() as stack:
        missing = _fill(model, _tensors(folder, device, stack), dtype, device, progress)
    if plain.get_text_config().tie_word_embeddings:
        model.tie_weights()
        missing -= {name for name in missing if not model.get_parameter(name).is_meta}
    if missing:
        raise CheckpointError(f"{folder}: the files lack {len(missing)} weights, among them {sorted(missing)[:3]}")
    _make_buffers(model, plain, device)
    if (folder / _GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _tensors(folder: Path, device: torch.device, stack: ExitStack) -> dict[str, Any]:
    """Return the open files by the names of their tensors. They are read when a tensor is asked for."""
    if (folder / _INDEX).is_file():
        names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    elif (folder / _SINGLE).is_file():
        names = {_SINGLE}
    else:
        raise CheckpointError(f"{folder}: it has neither {_INDEX} nor {_SINGLE}")
    found: dict[str, Any] = {}
    for name in sorted(names):
        file = stack.enter_context(safe_open(folder / name, "pt", device=str(device)))
        found |= dict.fromkeys(file.keys(), file)
    return found


@torch.no_grad()
def _fill(
    model: PreTrainedModel, files: Mapping[str, Any], dtype: torch.dtype, device: torch.device, progress: Progress
) -> set[str]:
    """Give the model its parameters, and return the names of those that no file has."""
    missing = set()
    names = [name for name, _ in model.named_parameters()]
    for name in progress.count(names, "weights", len(names)):
        module_name, _, own_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        parameter = torch.empty(module._parameters[own_name].shape, dtype=dtype, device=device)
        parts: Iterator[tuple[Tensor, Tensor]]
        if f"{name}{_BLOCKS}" in files and f"{name}{_SCALES}" in files:
            parts = _experts(name, files, parameter)
        elif name in files:
            parts = iter([(parameter, files[name].get_tensor(name))])
        else:
            missing.add(name)
            continue
        for place, tensor in parts:
            if place.shape != tensor.shape:
                raise CheckpointError(f"{name}: got {tuple(tensor.shape)}, expected {tuple(place.shape)}")
            place.copy_(tensor)
        module._parameters[own_name] = nn.Parameter(parameter)
    return missing


def _experts(name: str, files: Mapping[str, Any], parameter: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the place of each expert's weights in the parameter, and the weights."""
    blocks, scales = (files[name + end].get_slice(name + end) for end in (_BLOCKS, _SCALES))
    for expert, place in enumerate(parameter):
        yield place, dequantized(blocks[expert], scales[expert], parameter.dtype)


def _make_buffers(model: PreTrainedModel, config: PreTrainedConfig, device: torch.device) -> None:
    """Make the buffers that no checkpoint has: the frequencies of rotary embeddings."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            if not name.endswith("rotary_emb"):
                raise UnsupportedError(f"{config.model_type}: {name} has buffers, which mxfp4 checkpoints do not have")
            with torch.device(device):
                model.set_submodule(name, type(module)(config))
