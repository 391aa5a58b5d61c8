"""Writes models with experts in mxfp4, as gpt-oss is published, from the definition of the format.

Of 32 numbers, the scale is the power of two that makes the largest one at most 6. Each number becomes the nearest of
the sixteen values. The fourth bit is the sign.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6


def quantized(weight_EIO: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks (E, O, groups, 16) and the scales (E, O, groups) of the weights of all experts."""
    groups = weight_EIO.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3).clamp_min(1e-30) / 6).log2().ceil().clamp(-127, 127)
    scaled = groups / torch.exp2(exponents)[..., None]
    places = torch.bucketize(scaled.abs().contiguous(), _BETWEEN, out_int32=True) + 8 * (scaled < 0)
    blocks = places[..., 0::2] + 16 * places[..., 1::2]
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def save_mxfp4(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model to a folder, its experts in mxfp4, everything else in bf16."""
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantized(tensor)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder
