"""Checks the options that scripts for megatron-core pass to a model: fields of its ``TransformerConfig`` and the like.

An option that asks for what is done anyway is accepted. One that changes speed or memory but no result is accepted too,
and named in the log. Every other one is refused with the reason: no option is ignored silently.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

import torch
import torch.nn.functional as F

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.model.megatron.config import DecoderShape, refuse_options
from twinkle.model.megatron.mcore import DistributedDataParallelConfig, TransformerConfig
from twinkle.model.megatron.mesh import MegatronMesh
from twinkle.utils.logger import note_once

__all__ = ["check_ddp_config", "check_recompute", "check_transformer_options"]

_OWN_LAYERS = "layers, attention and head are our own"
_GRADIENTS = "gradients are added up once a step"
_MEMORY = "layers are recomputed where a batch does not fit into memory"
_GRAPHS = "CUDA graphs are not captured here"
_DISPATCH = "experts exchange their tokens in a way of our own"

# Fields that change speed or memory, but no result, and why they change nothing here.
_WITHOUT_EFFECT = {
    "apply_rope_fusion": _OWN_LAYERS,
    "async_tensor_model_parallel_allreduce": _OWN_LAYERS,
    "attention_backend": _OWN_LAYERS,
    "attention_softmax_in_fp32": _OWN_LAYERS,
    "barrier_with_L1_time": "nothing is timed",
    "batch_p2p_comm": "stages exchange one tensor at a time",
    "batch_p2p_sync": "stages exchange one tensor at a time",
    "bias_activation_fusion": _OWN_LAYERS,
    "bias_dropout_fusion": _OWN_LAYERS,
    "cross_entropy_fusion_impl": _OWN_LAYERS,
    "cross_entropy_loss_fusion": _OWN_LAYERS,
    "cuda_graph_impl": _GRAPHS,
    "cuda_graph_scope": _GRAPHS,
    "cuda_graph_warmup_steps": _GRAPHS,
    "deallocate_pipeline_outputs": "the outputs of a stage are kept until its backward pass",
    "defer_embedding_wgrad_compute": _GRADIENTS,
    "delay_wgrad_compute": _GRADIENTS,
    "deterministic_mode": "results do not change from run to run anyway",
    "distribute_saved_activations": _MEMORY,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "fused_single_qkv_rope": _OWN_LAYERS,
    "gradient_accumulation_fusion": _GRADIENTS,
    "masked_softmax_fusion": _OWN_LAYERS,
    "memory_efficient_layer_norm": _OWN_LAYERS,
    "moe_deepep_num_sms": _DISPATCH,
    "moe_enable_deepep": _DISPATCH,
    "moe_flex_dispatcher_backend": _DISPATCH,
    "moe_grouped_gemm": _DISPATCH,
    "moe_hybridep_num_sms": _DISPATCH,
    "moe_layer_recompute": _MEMORY,
    "moe_permute_fusion": _DISPATCH,
    "moe_router_fusion": _DISPATCH,
    "moe_shared_expert_overlap": _DISPATCH,
    "moe_token_dispatcher_type": _DISPATCH,
    "moe_use_legacy_grouped_gemm": _DISPATCH,
    "overlap_moe_expert_parallel_comm": _DISPATCH,
    "overlap_p2p_comm": "stages wait for what they receive",
    "overlap_p2p_comm_warmup_flush": "stages wait for what they receive",
    "perform_initialization": "weights are read from the model's files",
    "persist_layer_norm": _OWN_LAYERS,
    "pipeline_model_parallel_comm_backend": "the group's own backend is used",
    "use_cpu_initialization": "weights are read from the model's files",
    "use_fused_weighted_squared_relu": _OWN_LAYERS,
    "use_ring_exchange_p2p": "stages exchange one tensor at a time",
    "variable_seq_lengths": "sequences of any lengths are packed into rows",
    "wgrad_deferral_limit": _GRADIENTS,
}


def check_transformer_options(options: Mapping[str, Any], shape: DecoderShape, mesh: MegatronMesh, dtype: Any) -> None:
    """Check fields of megatron-core's TransformerConfig for a model of this shape, mesh and dtype."""
    known = {field.name: field for field in fields(TransformerConfig)}
    refuse_options(options)
    present = _settings(shape, mesh, dtype)
    for name, value in options.items():
        if name not in known or name.startswith("_"):
            raise UnknownNameError("option of a Megatron model", name, sorted({*present, *_WITHOUT_EFFECT}))
        if name in _WITHOUT_EFFECT:
            note_once(f"{name}: no effect; {_WITHOUT_EFFECT[name]}")
        elif name in present:
            _require(name, value, present[name], "it comes from the model's own configuration, mesh and precision")
        elif name not in _OFF:
            _require(name, value, _default(known[name]), "the layers here do not read it")


# Fields with several values that mean "off"; refuse_options has checked them.
_OFF = (
    "context_parallel_size",
    "expert_tensor_parallel_size",
    "fp4",
    "fp8",
    "tp_comm_overlap",
    "transformer_impl",
    "virtual_pipeline_model_parallel_size",
)


def _require(name: str, value: Any, wanted: Any, reason: str) -> None:
    if type(value) is not type(wanted) and not (isinstance(value, int | float) and isinstance(wanted, int | float)):
        same = False
    else:
        same = bool(value == wanted)
    if not same:
        raise UnsupportedError(f"{name}: got {value!r}, allowed: {wanted!r}; {reason}")


def _default(field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _settings(shape: DecoderShape, mesh: MegatronMesh, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields that a model, its mesh and its precision determine."""
    experts, sizes = shape.experts, mesh.sizes
    return {
        "activation_func": F.silu,
        "add_bias_linear": shape.mlp_bias,
        "add_qkv_bias": shape.qkv_bias,
        "attention_output_gate": shape.gated,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        "expert_model_parallel_size": sizes.ep,
        "ffn_hidden_size": shape.intermediate,
        "fp16": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "hidden_size": shape.hidden,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.eps,
        "layernorm_zero_centered_gamma": shape.centered_norms,
        "moe_aux_loss_coeff": 0.0,
        "moe_ffn_hidden_size": None if experts is None else experts.intermediate,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": experts is not None and not experts.normalize,
        "moe_router_topk": 2 if experts is None else experts.per_token,
        "normalization": "RMSNorm",
        "num_attention_heads": shape.heads,
        "num_layers": shape.layers,
        "num_moe_experts": None if experts is None else experts.count,
        "num_query_groups": shape.kv_heads,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "pipeline_model_parallel_size": sizes.pp,
        "qk_layernorm": shape.qk_norm,
        "sequence_parallel": mesh.sequence_parallel,
        "tensor_model_parallel_size": sizes.tp,
    }


_GRANULARITIES = (None, "full", "selective")
_METHODS = (None, "uniform", "block")


def check_recompute(
    granularity: str | None, method: str | None, num_layers: int | None, modules: list[str] | None
) -> None:
    """Check how activations are to be recomputed. The trainer decides that by the memory that a batch needs."""
    if granularity not in _GRANULARITIES:
        raise InvalidInputError("recompute_granularity", granularity, "'full', 'selective' or None")
    if method not in _METHODS:
        raise InvalidInputError("recompute_method", method, "'uniform', 'block' or None")
    if num_layers is not None and (not isinstance(num_layers, int) or num_layers < 1):
        raise InvalidInputError("recompute_num_layers", num_layers, "an integer ≥ 1 or None")
    if (granularity, method, num_layers, modules) != ("full", "uniform", 1, None):
        note_once(f"recompute_granularity and its companions: no effect; {_MEMORY}")


def check_ddp_config(ddp_config: Mapping[str, Any] | None) -> None:
    """Check fields of megatron-core's DistributedDataParallelConfig: they describe a wrapper for gradients."""
    known = {field.name for field in fields(DistributedDataParallelConfig)}
    for name, value in (ddp_config or {}).items():
        if name not in known:
            raise UnknownNameError("ddp_config entry", name, known)
        if name in ("use_megatron_fsdp", "use_custom_fsdp", "fp8_param_gather") and value:
            raise UnsupportedError(f"ddp_config.{name}: got {value!r}, allowed: False; weights are cut by tp and pp")
    if ddp_config:
        note_once(f"ddp_config: no effect; {_GRADIENTS}, without a wrapper")
