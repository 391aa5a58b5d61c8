"""The facts about a Hugging Face decoder that training adapters on it needs, read from the loaded model.

A model in which tokens interact in attention only can run packed (:mod:`twinkle.model.decoder.attention`): all
sequences of a batch form one row. Layers that carry state along the sequence (linear attention, convolutions) would mix
neighbouring sequences of such a row. Those of Qwen3.5 are replaced by layers that know where sequences begin
(:mod:`twinkle.model.decoder.linear_attention`); models with others run padded, with their own attention.
:mod:`twinkle.model.decoder.loading` chooses between the two, and sets the model's attention implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from twinkle.errors import UnsupportedError
from twinkle.images.processing import VISION_FAMILIES
from twinkle.model.decoder.attention import PACKED
from twinkle.model.decoder.head import HeadSpec
from twinkle.model.decoder.linear_attention.layer import JOINT, PARTS, is_delta_net, part_sizes
from twinkle.model.decoder.lora.stacks import Target
from twinkle.model.types import RoutingSpec, VisionSpec

# Families that the tests cover. For any other, a trainer compares its results with the model's own forward pass (see
# trainer/self_check.py).
TESTED_FAMILIES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama",
        "mistral",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
    }
)

# Module names of attention (or other token mixing) and of feed-forward blocks. Of linear layers outside both, only
# the head may get LoRA.
_ATTENTION_PARTS = frozenset({"attention", "attn", "conv", "linear_attn", "self_attn", "self_attention"})
_MLP_PARTS = frozenset({"fc1", "fc2", "feed_forward", "ffn", "mlp", "mlp_block"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_PACKABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class Experts:
    """The experts of one decoder layer: ``count`` of them, each with a gate, an up and a down projection.

    ``name``: that of their module, whose parameters ``gate_up_proj`` and ``down_proj`` hold the weights of all.
    """

    name: str
    count: int
    hidden: int
    width: int
    alternating: bool = False  # the outputs of gate and up stand in turns in ``gate_up_proj``

    @property
    def shared_outer(self) -> tuple[Target, ...]:
        """Return Tinker's projections: all experts share the factor that has the hidden size."""
        gate = Target(f"{self.name}.w1", self.hidden, self.width, copies=(1, self.count), alternates=self.alternating)
        down = Target(f"{self.name}.w2", self.width, self.hidden, copies=(self.count, 1))
        return gate, down, replace(gate, name=f"{self.name}.w3")

    @property
    def independent(self) -> tuple[Target, ...]:
        """Return PEFT's projections: each expert has both factors, and gate and up are one projection.

        Their names are those of the parameters.
        """
        every = (self.count, self.count)
        gate_up = Target(
            f"{self.name}.gate_up_proj", self.hidden, 2 * self.width, copies=every, alternates=self.alternating
        )
        return gate_up, Target(f"{self.name}.down_proj", self.width, self.hidden, copies=every)


@dataclass(frozen=True)
class Split:
    """A linear layer of several projections. An adapter is on the whole layer, as in PEFT, or on its projections."""

    whole: Target
    parts: tuple[Target, ...]


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
    experts: tuple[Experts, ...]  # one entry for each layer that has some
    has_other_experts: bool  # experts of a form that we do not know: they run, but no adapter can train them
    vocab_size: int
    max_length: int
    length_class: Callable[[int], int]
    vision: VisionSpec | None = None  # None: the model reads text only
    routing: RoutingSpec | None = None  # None: there are no routes to record and replay
    split: tuple[Split, ...] = ()

    @property
    def linear(self) -> tuple[Target, ...]:
        return self.attention + self.mlp

    @property
    def projections(self) -> tuple[Target, ...]:
        """Return the linear layers, and behind each that has several projections, these one by one."""
        parts = {split.whole.name: split.parts for split in self.split}
        return tuple(each for target in self.linear for each in (target, *parts.get(target.name, ())))

    @property
    def has_linear_attention(self) -> bool:
        """Return whether some layers carry state along the sequence, in a model that runs packed."""
        return bool(self.split)

    @property
    def samples_with_cache(self) -> bool:
        """Return whether a sampler can keep what earlier tokens left behind. Without, it computes whole sequences."""
        return not self.padded

    @property
    def shared_outer(self) -> tuple[Target, ...]:
        """Return the projections of all experts, in the form in which Tinker trains them."""
        return tuple(target for experts in self.experts for target in experts.shared_outer)

    @property
    def independent(self) -> tuple[Target, ...]:
        """Return the projections of all experts, in the form in which PEFT trains them."""
        return tuple(target for experts in self.experts for target in experts.independent)


def mixes_by_attention_alone(model: PreTrainedModel) -> bool:
    """Return whether tokens interact in attention only: only then may several sequences share a packed row."""
    layer_types = model.config.get_text_config().to_dict().get("layer_types") or ()
    convolves = any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules())
    return set(layer_types) <= _PACKABLE_LAYER_TYPES and not convolves


def state_is_known(model: PreTrainedModel) -> bool:
    """Return whether the layers with state along the sequence are all delta nets, which know where sequences begin."""
    layer_types = model.config.get_text_config().to_dict().get("layer_types") or ()
    modules = dict(model.get_decoder().named_modules())
    nets = [name for name, module in modules.items() if is_delta_net(module)]
    convolutions = [name for name, module in modules.items() if isinstance(module, nn.Conv1d)]
    known = all(any(name.startswith(f"{net}.") for net in nets) for name in convolutions)
    return bool(nets) and known and set(layer_types) <= _PACKABLE_LAYER_TYPES | {"linear_attention"}


def read_architecture(model: PreTrainedModel) -> Architecture:
    config = model.config.get_text_config()
    if model.base_model is model:
        raise UnsupportedError(f"{config.model_type}: no decoder found apart from its output head")
    layers_path = find_layers(model)
    layers = model.get_submodule(layers_path)
    if config.model_type != "gpt_oss" and any(
        "sinks" in dict(module.named_parameters(recurse=False)) for module in layers.modules()
    ):  # other families might give them to attention by another name
        raise UnsupportedError(f"{config.model_type}: attention sinks are supported for gpt_oss only")
    if config.to_dict().get("use_bidirectional_attention") is True:
        raise UnsupportedError(f"{config.model_type}: bidirectional attention; only causal decoders are supported")
    attention, mlp = _linear_layers(layers, layers_path)
    experts = _experts(layers, layers_path)
    if not attention:
        raise UnsupportedError(f"{config.model_type}: no linear layers found in its attention blocks")
    head_name, head = _head(model)
    packed = config._attn_implementation == PACKED
    return Architecture(
        family=config.model_type,
        layers_path=layers_path,
        layer_count=config.num_hidden_layers,
        attention=attention,
        mlp=mlp,
        head=Target(head_name, head.in_features, head.out_features),
        module_names=frozenset(name for name, _ in model.named_modules()),
        head_spec=_head_spec(config, head),
        padded=not packed,
        experts=experts,
        has_other_experts=len(experts) < sum(name.split(".")[-1] == "experts" for name, _ in layers.named_modules()),
        vocab_size=min(head.out_features, model.get_input_embeddings().weight.shape[0]),
        max_length=_max_length(config),
        length_class=_length_class(config),
        vision=read_vision(model),
        split=_split(layers, layers_path) if packed else (),
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


def _experts(layers: nn.Module, layers_path: str) -> tuple[Experts, ...]:
    """Return the layers' experts that have the form which Transformers' experts interface defines."""
    found = []
    for name, module in layers.named_modules():
        if name.split(".")[-1] != "experts" or getattr(module, "has_post_expert_norm", False):
            continue
        weights = dict(module.named_parameters(recurse=False))
        biases = {"gate_up_proj_bias", "down_proj_bias"} if getattr(module, "has_bias", False) else set()
        if weights.keys() != {"gate_up_proj", "down_proj", *biases}:
            continue
        count, hidden, width = weights["down_proj"].shape
        if module.is_transposed:
            hidden, width = width, hidden
        found.append(Experts(f"{layers_path}.{name}", count, hidden, width, alternating=_alternate(module)))
    return tuple(found)


def _alternate(experts: nn.Module) -> bool:
    """Return whether the outputs of gate and up stand in turns. Transformers 5.5 does not say it: gpt-oss's do."""
    return not getattr(experts, "is_concatenated", type(experts).__name__ != "GptOssExperts")


def _split(layers: nn.Module, layers_path: str) -> tuple[Split, ...]:
    """Return the layers' linear layers of several projections: those of query, key and value of delta nets."""
    found = []
    for name, net in layers.named_modules():
        if is_delta_net(net):
            front, joint = f"{layers_path}.{name}", net.get_submodule(JOINT)
            parts = zip(PARTS, part_sizes(net), strict=True)
            found.append(
                Split(
                    Target(f"{front}.{JOINT}", joint.in_features, joint.out_features),
                    tuple(Target(f"{front}.{part}", joint.in_features, size) for part, size in parts),
                )
            )
    return tuple(found)


def _linear_layers(layers: nn.Module, layers_path: str) -> tuple[tuple[Target, ...], tuple[Target, ...]]:
    """Return the linear layers of attention and those of feed-forward blocks; of experts, the ones that all rows use.

    Routers are not among them: they are never trained.
    """
    attention, mlp = [], []
    for name, module in layers.named_modules():
        parts = set(name.split("."))
        if type(module) is nn.Linear and "experts" not in parts:
            target = Target(f"{layers_path}.{name}", module.in_features, module.out_features)
            if parts & _ATTENTION_PARTS:
                attention.append(target)
            elif parts & _MLP_PARTS and name.split(".")[-1] not in _ROUTERS:
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
