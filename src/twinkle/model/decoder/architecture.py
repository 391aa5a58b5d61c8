"""The facts about a Hugging Face decoder that training adapters on it needs, read from the loaded model.

A model in which tokens interact in attention only can run packed (:mod:`twinkle.model.decoder.attention`): all
sequences of a batch form one row. Layers that carry state along the sequence (linear attention, convolutions) would mix
neighbouring sequences of such a row, so models with them run padded, with their own attention.
:mod:`twinkle.model.decoder.loading` chooses between the two, and sets the model's attention implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from twinkle.errors import UnsupportedError
from twinkle.model.decoder.attention import PACKED
from twinkle.model.decoder.head import HeadSpec
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.types import VisionSpec

# Families that the tests cover. For any other, a trainer compares its results with the model's own forward pass (see
# trainer/self_check.py).
TESTED_FAMILIES = frozenset(
    {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe"}
)

# Families whose images we place. Others with a vision tower are trained and sampled on text alone.
VISION_FAMILIES = frozenset({"qwen2_5_vl", "qwen3_vl", "qwen3_5"})

# Module names of attention (or other token mixing) and of feed-forward blocks. Of linear layers outside both, only
# the head may get LoRA.
_ATTENTION_PARTS = frozenset({"attention", "attn", "conv", "linear_attn", "self_attn", "self_attention"})
_MLP_PARTS = frozenset({"fc1", "fc2", "feed_forward", "ffn", "mlp", "mlp_block"})
_PACKABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class Architecture:
    """What training needs to know about a loaded model: its linear layers and head for adapters, and its limits."""

    family: str
    layers_path: str  # name of the list of decoder layers, e.g. "model.layers"
    layer_count: int
    attention: tuple[Target, ...]
    mlp: tuple[Target, ...]
    head: Target
    module_names: frozenset[str]  # of all modules of the model; PEFT compares its target names with these
    head_spec: HeadSpec
    padded: bool
    has_experts: bool
    vocab_size: int
    max_length: int
    length_class: Callable[[int], int]
    vision: VisionSpec | None = None  # None: the model reads text only

    @property
    def linear(self) -> tuple[Target, ...]:
        return self.attention + self.mlp


def mixes_by_attention_alone(model: PreTrainedModel) -> bool:
    """Return whether tokens interact in attention only: only then may several sequences share a packed row."""
    layer_types = model.config.get_text_config().to_dict().get("layer_types") or ()
    convolves = any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules())
    return set(layer_types) <= _PACKABLE_LAYER_TYPES and not convolves


def read_architecture(model: PreTrainedModel) -> Architecture:
    config = model.config.get_text_config()
    if model.base_model is model:
        raise UnsupportedError(f"{config.model_type}: no decoder found apart from its output head")
    layers_path = find_layers(model)
    layers = model.get_submodule(layers_path)
    if any("sinks" in dict(module.named_parameters(recurse=False)) for module in layers.modules()):
        raise UnsupportedError(f"{config.model_type}: attention sinks are not supported yet")
    if config.to_dict().get("use_bidirectional_attention") is True:
        raise UnsupportedError(f"{config.model_type}: bidirectional attention; only causal decoders are supported")
    has_experts = any("experts" in name.split(".") for name, _ in layers.named_modules())
    attention, mlp = _linear_layers(layers, layers_path, has_experts)
    if not attention:
        raise UnsupportedError(f"{config.model_type}: no linear layers found in its attention blocks")
    head_name, head = _head(model)
    return Architecture(
        family=config.model_type,
        layers_path=layers_path,
        layer_count=config.num_hidden_layers,
        attention=attention,
        mlp=mlp,
        head=Target(head_name, head.in_features, head.out_features),
        module_names=frozenset(name for name, _ in model.named_modules()),
        head_spec=_head_spec(config, head),
        padded=config._attn_implementation != PACKED,
        has_experts=has_experts,
        vocab_size=min(head.out_features, model.get_input_embeddings().weight.shape[0]),
        max_length=_max_length(config),
        length_class=_length_class(config),
        vision=read_vision(model),
    )


def read_vision(model: PreTrainedModel) -> VisionSpec | None:
    """Return what a model wants of images; None if it reads text only, or its images cannot be placed."""
    config = model.config
    if config.model_type not in VISION_FAMILIES or getattr(model.base_model, "visual", None) is None:
        return None
    seen = config.vision_config
    channels = getattr(seen, "in_channels", None) or seen.in_chans  # the name depends on the family
    width = channels * seen.temporal_patch_size * seen.patch_size**2
    return VisionSpec(config.image_token_id, width, seen.spatial_merge_size)


def find_layers(model: PreTrainedModel) -> str:
    """Return the name of the list of decoder layers."""
    count = model.config.get_text_config().num_hidden_layers
    inside = {id(module) for module in model.get_decoder().modules()}  # not those of a vision tower
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == count and name.split(".")[-1] == "layers"
        if is_list and id(module) in inside:
            return name
    raise UnsupportedError(f"{model.config.model_type}: no list of {count} decoder layers named 'layers'")


def _linear_layers(
    layers: nn.Module, layers_path: str, has_experts: bool
) -> tuple[tuple[Target, ...], tuple[Target, ...]]:
    """Return the linear layers of attention and those of feed-forward blocks."""
    attention, mlp = [], []
    for name, module in layers.named_modules():
        parts = set(name.split("."))
        if type(module) is nn.Linear and "experts" not in parts:
            target = Target(f"{layers_path}.{name}", module.in_features, module.out_features)
            if parts & _ATTENTION_PARTS:
                attention.append(target)
            elif parts & _MLP_PARTS and not has_experts:
                mlp.append(target)
    return tuple(attention), tuple(mlp)


def _head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and isinstance(module, nn.Linear):
            return name, module
    raise UnsupportedError(f"{model.config.model_type}: its output head is not a linear layer")


def _head_spec(config: PreTrainedConfig, head: nn.Linear) -> HeadSpec:
    scale, softcap = logit_shape(config)
    return HeadSpec(head.weight.detach(), None if head.bias is None else head.bias.detach(), scale, softcap)


def logit_shape(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the scale and the soft cap that a family applies to its logits."""
    values = config.to_dict()
    scale = 1.0
    if values.get("logits_scaling") is not None:  # Granite divides
        scale = 1.0 / values["logits_scaling"]
    if values.get("logit_scale") is not None:  # Cohere multiplies
        scale = values["logit_scale"]
    return scale, values.get("final_logit_softcapping")


def _ropes(config: PreTrainedConfig) -> list[dict[str, object]]:
    """Return the settings of rotary embeddings: one dict, or one per type of layer (Gemma 3)."""
    settings = config.to_dict().get("rope_parameters") or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def _max_length(config: PreTrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedError(f"{config.model_type}: its configuration has no max_position_embeddings")
    # Beyond the original length, dynamic RoPE frequencies depend on the longest sequence that any tenant ever sent.
    dynamic = [rope for rope in _ropes(config) if "dynamic" in str(rope.get("rope_type"))]
    return min([length, *(_original_length(rope, length) for rope in dynamic)])


def _length_class(config: PreTrainedConfig) -> Callable[[int], int]:
    """Return a function from a sequence's length to its class; sequences of different classes never share a batch.

    longrope chooses short or long frequencies by the longest position of the batch, so a long sequence would change the
    results of short ones beside it.
    """
    ropes = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    fallback = config.to_dict().get("original_max_position_embeddings") or config.max_position_embeddings
    thresholds = [_original_length(rope, fallback) for rope in ropes]
    return lambda length: sum(length > threshold for threshold in thresholds)


def fixed_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the length up to which rotary frequencies do not depend on the longest position of a batch; None: any."""
    ropes = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    ropes += [rope for rope in _ropes(config) if "dynamic" in str(rope.get("rope_type"))]
    if not ropes:
        return None
    fallback = config.to_dict().get("original_max_position_embeddings") or config.max_position_embeddings
    return min(_original_length(rope, fallback) for rope in ropes)


def _original_length(rope: dict[str, object], fallback: int) -> int:
    length = rope.get("original_max_position_embeddings")
    return length if isinstance(length, int) else fallback
