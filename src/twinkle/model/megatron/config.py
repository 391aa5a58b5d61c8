"""The shape of a decoder as its Hugging Face configuration has it, the meshes it allows, and megatron-core's settings.

Every family is read here. A family that is not listed is refused, because its layers may differ in ways that its
configuration does not show.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from twinkle.errors import UnsupportedError
from twinkle.model.megatron.mcore import TransformerConfig
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.model.megatron.sizes import MeshSizes, ModelCounts, check_counts, check_family, family_name

__all__ = [
    "DecoderShape",
    "ExpertShape",
    "LinearShape",
    "StageSpec",
    "check_sizes",
    "read_rope",
    "read_shape",
    "refuse_options",
    "stage_config",
    "text_config",
]

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a mixture-of-experts layer, and how a token chooses among them."""

    count: int
    per_token: int
    intermediate: int
    normalize: bool  # whether the weights of a token's experts add up to 1


@dataclass(frozen=True)
class LinearShape:
    """The sizes of a layer's linear attention, which is a gated delta net."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    window: int  # how many tokens its convolution sees


@dataclass(frozen=True)
class DecoderShape:
    """The sizes and options of a decoder's layers. ``intermediate`` is that of feed-forward blocks without experts."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    gated: bool  # whether the outputs of attention are gated; q_proj then has the gate of each head behind its query
    centered_norms: bool  # whether norms multiply by 1 + weight
    tied: bool  # whether the head has the weights of the embedding
    windows: tuple[int | None, ...]  # of each layer: how many tokens its attention looks back; None: all
    experts: ExpertShape | None
    expert_layers: frozenset[int]  # the layers that have experts
    linear: LinearShape | None = None
    linear_layers: frozenset[int] = frozenset()  # the layers that have linear attention in the place of attention

    def padded_vocabulary(self, tp: int) -> int:
        """Return the number of rows of embedding and head together on ``tp`` ranks: all have the same number."""
        return -(-self.vocabulary // tp) * tp


@dataclass(frozen=True)
class StageSpec:
    """What the layers of a stage are built from: the decoder's shape, this process's mesh, and where weights are."""

    shape: DecoderShape
    mesh: MegatronMesh
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Biases:
    """Which linear layers of a family have a bias."""

    qkv: bool
    output: bool
    mlp: bool


# family → its biases, and whether queries and keys are normalized
_FAMILIES: dict[str, tuple[Callable[[PreTrainedConfig], _Biases], bool]] = {
    "llama": (lambda config: _Biases(config.attention_bias, config.attention_bias, config.mlp_bias), False),
    "qwen2": (lambda config: _Biases(True, False, False), False),
    "qwen3": (lambda config: _Biases(config.attention_bias, config.attention_bias, False), True),
    "qwen3_5": (lambda config: _Biases(config.attention_bias, config.attention_bias, False), True),
    "qwen3_moe": (lambda config: _Biases(config.attention_bias, config.attention_bias, False), True),
}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the decoder alone; raise for a family of models that is not supported.

    The decoder of a model with a vision tower is a model of its own, which reads text.
    """
    family = family_name(config.model_type)
    check_family(family)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(f"{family}: its weights are quantized; the Megatron backend reads bf16, fp16 and fp32")
    own = config.get_text_config()
    if own is not config:
        own = copy.deepcopy(own)
        own.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[own.model_type]]
    return own


def read_shape(config: PreTrainedConfig) -> DecoderShape:
    """Return the shape of a decoder; raise for a family or option that is not supported."""
    config = text_config(config)
    family = family_name(config.model_type)
    read_biases, qk_norm = _FAMILIES[family]
    has_linear = family == "qwen3_5"
    biases, experts = read_biases(config), _experts(config)
    return DecoderShape(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
        activation=config.hidden_act,
        qkv_bias=biases.qkv,
        output_bias=biases.output,
        mlp_bias=biases.mlp,
        qk_norm=qk_norm,
        gated=has_linear,
        centered_norms=has_linear,
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config),
        experts=experts,
        expert_layers=frozenset(filter(lambda layer: _has_experts(config, layer), range(config.num_hidden_layers))),
        linear=_linear(config) if has_linear else None,
        linear_layers=_linear_layers(config) if has_linear else frozenset(),
    )


def _linear(config: PreTrainedConfig) -> LinearShape:
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act: got {config.hidden_act!r}, linear attention is known with 'silu' only")
    return LinearShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def _linear_layers(config: PreTrainedConfig) -> frozenset[int]:
    types = dict(enumerate(config.layer_types))
    unknown = sorted(set(types.values()) - {"full_attention", "linear_attention"})
    if unknown:
        raise UnsupportedError(f"layer_types: got {unknown}, allowed: full_attention and linear_attention")
    return frozenset(layer for layer, kind in types.items() if kind == "linear_attention")


def _experts(config: PreTrainedConfig) -> ExpertShape | None:
    if config.model_type != "qwen3_moe":
        return None
    return ExpertShape(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
    )


def _has_experts(config: PreTrainedConfig, layer: int) -> bool:
    if _experts(config) is None or layer in config.mlp_only_layers:
        return False
    return config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type == "qwen3_moe":  # its layers all have the window
        return (window,) * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(window if each == "sliding_attention" else None for each in types)


def read_rope(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """Return the frequencies of rotary embeddings, and the factor of their cosines and sines.

    There are head_dim / 2 of them; fewer where only the first features of each head are rotated.
    """
    config = text_config(config)
    settings = config.rope_parameters
    kind = settings.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedError(f"{config.model_type}: rope_type {kind!r}; supported: {', '.join(_ROPE_TYPES)}")
    rotated = settings.get("partial_rotary_factor", 1.0)
    if rotated != 1.0 and family_name(config.model_type) != "qwen3_5":
        raise UnsupportedError(f"{config.model_type}: rotary embeddings of a part of each head are not supported")
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies, scaling
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_dim * rotated)
    return 1.0 / (settings["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0


def check_sizes(shape: DecoderShape, sizes: MeshSizes) -> None:
    """Raise for a mesh that cannot hold this decoder, with the sizes that work."""
    all_experts = len(shape.expert_layers) == shape.layers
    counts = ModelCounts(
        family=shape.family,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        intermediate=None if all_experts else shape.intermediate,
        experts=None if shape.experts is None else shape.experts.count,
    )
    check_counts(counts, sizes)


# Fields of megatron-core's TransformerConfig that ask for what is not here, with the values that mean "off".
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "fp8": ((None, False), "fp8 needs Transformer Engine"),
    "fp4": ((None, False), "fp4 needs Transformer Engine"),
    "transformer_impl": ((None, "local"), "layers are our own; Transformer Engine is not used"),
    "context_parallel_size": ((None, 1), "context parallelism needs Transformer Engine"),
    "virtual_pipeline_model_parallel_size": ((None, 1), "a process runs one stage of the pipeline"),
    "expert_tensor_parallel_size": ((None, 1), "experts are spread by ep_size, each is whole"),
    "tp_comm_overlap": ((None, False), "overlapped communication needs Transformer Engine"),
}


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise for options of megatron-core that are not supported here."""
    for name, value in options.items():
        off, reason = _REFUSED.get(name, ((value,), ""))
        if value not in off:
            raise UnsupportedError(f"{name}: got {value!r}, allowed: {off[-1]!r}; {reason}")


def stage_config(spec: StageSpec) -> TransformerConfig:
    """Return megatron-core's settings for a stage, as its containers and pipeline schedules read them."""
    shape, mesh, dtype = spec.shape, spec.mesh, spec.dtype
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate,
        "layernorm_epsilon": shape.eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "use_cpu_initialization": True,  # not on CUDA's current device, but on torch's default device
        "perform_initialization": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": mesh.sizes.tp,
        "pipeline_model_parallel_size": mesh.sizes.pp,
        "sequence_parallel": mesh.sequence_parallel,
        "batch_p2p_sync": False,
        "variable_seq_lengths": True,  # micro-batches have different numbers of tokens
        "moe_token_dispatcher_type": "alltoall",  # asked for by the line above, also for models without experts
        "calculate_per_token_loss": True,  # schedules must not scale the loss
    }
    with warnings.catch_warnings():  # one of its defaults is deprecated in 0.16
        warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
        return TransformerConfig(**settings)
