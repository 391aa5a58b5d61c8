"""What Twinkle must know of a Hugging Face decoder to train adapters on it, read off the loaded model.

Layers whose token mixing is attention alone run packed. Layers that carry state along the sequence (linear attention,
convolutions) would mix neighbours in a packed row, so such models run padded instead.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from twinkle.errors import UnsupportedError
from twinkle.model.head import HeadSpec
from twinkle.model.stacks import Target

# Families pinned by the tests. Any other decoder is compared with its own forward pass when it is loaded.
TESTED_FAMILIES = frozenset(
    {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe"}
)

_ATTENTION_PARTS = frozenset({"attention", "attn", "linear_attn", "self_attn", "self_attention"})
_MLP_PARTS = frozenset({"feed_forward", "ffn", "mlp"})
_PACKABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class Architecture:
    """The parts of one loaded model."""

    family: str
    layers_path: str  # of the decoder layers, e.g. "model.layers"
    layer_count: int
    attention: tuple[Target, ...]
    mlp: tuple[Target, ...]
    head: Target
    head_spec: HeadSpec
    padded: bool
    has_experts: bool
    vocab_size: int
    max_length: int
    length_class: Callable[[int], int]

    @property
    def linear(self) -> tuple[Target, ...]:
        return self.attention + self.mlp


def needs_padding(config: PreTrainedConfig) -> bool:
    """Whether some layer mixes tokens by anything but attention, as far as the configuration tells."""
    layer_types = config.get_text_config().to_dict().get("layer_types") or ()
    return not set(layer_types) <= _PACKABLE_LAYER_TYPES


def read_architecture(model: PreTrainedModel) -> Architecture:
    config = model.config.get_text_config()
    layers_path = _layers_path(model, config.num_hidden_layers)
    layers = model.get_submodule(layers_path)
    has_experts = any("experts" in name.split(".") for name, _ in layers.named_modules())
    attention, mlp = [], []
    for name, module in layers.named_modules():
        parts = set(name.split("."))
        if type(module) is nn.Linear and "experts" not in parts:
            target = Target(f"{layers_path}.{name}", module.in_features, module.out_features)
            if parts & _ATTENTION_PARTS:
                attention.append(target)
            elif parts & _MLP_PARTS and not has_experts:
                mlp.append(target)
    if not attention:
        raise UnsupportedError(f"{config.model_type}: no linear layers found in its attention blocks")
    if any("sinks" in dict(module.named_parameters(recurse=False)) for module in layers.modules()):
        raise UnsupportedError(f"{config.model_type}: attention sinks are not supported yet")
    head_name, head = _head(model)
    return Architecture(
        family=config.model_type,
        layers_path=layers_path,
        layer_count=config.num_hidden_layers,
        attention=tuple(attention),
        mlp=tuple(mlp),
        head=Target(head_name, head.in_features, head.out_features),
        head_spec=_head_spec(config, head),
        padded=needs_padding(model.config) or any(isinstance(m, nn.Conv1d) for m in layers.modules()),
        has_experts=has_experts,
        vocab_size=head.out_features,
        max_length=_max_length(config),
        length_class=_length_class(config),
    )


def _layers_path(model: PreTrainedModel, count: int) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and name.split(".")[-1] == "layers":
            return name
    raise UnsupportedError(f"{model.config.model_type}: no list of {count} decoder layers named 'layers'")


def _head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and isinstance(module, nn.Linear):
            return name, module
    raise UnsupportedError(f"{model.config.model_type}: its output head is not a linear layer")


def _head_spec(config: PreTrainedConfig, head: nn.Linear) -> HeadSpec:
    values = config.to_dict()
    scale = 1.0
    if values.get("logits_scaling") is not None:  # Granite divides
        scale = 1.0 / values["logits_scaling"]
    if values.get("logit_scale") is not None:  # Cohere multiplies
        scale = values["logit_scale"]
    bias = None if head.bias is None else head.bias.detach()
    return HeadSpec(head.weight.detach(), bias, scale, values.get("final_logit_softcapping"))


def _rope(config: PreTrainedConfig) -> dict[str, object]:
    return config.to_dict().get("rope_parameters") or {}


def _max_length(config: PreTrainedConfig) -> int:
    rope = _rope(config)
    if rope.get("rope_type") == "dynamic":
        # Beyond this length the frequencies would depend on the longest sequence any tenant ever sent.
        return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return int(config.max_position_embeddings)


def _length_class(config: PreTrainedConfig) -> Callable[[int], int]:
    """longrope picks short or long frequencies by the longest position in the batch: the two never share one."""
    rope = _rope(config)
    if rope.get("rope_type") != "longrope":
        return lambda length: 0
    threshold = int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    return lambda length: int(length > threshold)


def amx_available() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (then bf16 is the default there too)."""
    try:
        with open("/proc/cpuinfo") as info:
            return "amx_bf16" in info.read()
    except OSError:  # not Linux
        return False


def default_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda" or (device.type == "cpu" and amx_available()):
        return torch.bfloat16
    return torch.float32
