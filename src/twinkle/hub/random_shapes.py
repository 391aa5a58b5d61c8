"""The configurations of ``random://`` models: the shapes of real models, and tiny ones for tests on CPU.

A configuration lacks the ids of special tokens of its text; those of vision models are here, because their names are
part of the configuration.
"""

from collections.abc import Mapping

__all__ = ["HARMONY_SPECIAL_TOKENS", "QWEN_SPECIAL_TOKENS", "RANDOM_MODELS", "patch_size"]

# What follows the 256 bytes in the vocabulary of Qwen models. Real ones have more, and other ids.
QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
)
# The same for gpt-oss, whose format of conversations is called harmony.
HARMONY_SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
_VISION_TOKENS = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
}


def _llama(**shape: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        **shape,
    }


def _llama3_rope(factor: float) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "factor": factor,
    }


def _rope(theta: float, **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _gpt_oss(layers: int, original_length: int, **shape: object) -> dict[str, object]:
    """Return a configuration whose layers have a sliding window in turns, beginning with the first."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "num_experts_per_tok": 4,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": original_length,
        },
        **shape,
    }


def _vision_model(
    architecture: str, model_type: str, text: dict[str, object], vision: dict[str, object]
) -> dict[str, object]:
    """Return the configuration of a model with a vision tower. The dtype of the text is that of the whole model."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"model_type": f"{model_type}_text", **text},
        "vision_config": vision,  # without its model_type, which differs between versions of Transformers
        **_VISION_TOKENS,
    }


_QWEN3_8B: dict[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "dtype": "bfloat16",
}

_QWEN3_30B_A3B: dict[str, object] = {
    **_QWEN3_8B,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_QWEN3_VL_TOWER: dict[str, object] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN3_VL: dict[str, object] = {
    "max_position_embeddings": 262144,
    "rope_parameters": _rope(5000000.0, mrope_section=[24, 20, 20], mrope_interleaved=True),
}

# Weights of tiny Qwen models vary more than those of real ones, so that images change what the models say.
_QWEN_TINY: dict[str, object] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "dtype": "float32",
}
_LINEAR_TINY: dict[str, object] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": _rope(10000.0, mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
}
_TINY_TOWER: dict[str, object] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.1,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

RANDOM_MODELS: dict[str, dict[str, object]] = {
    # Llama-3.2-1B
    "llama-1b": _llama(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rope_parameters=_llama3_rope(factor=32.0),
        dtype="bfloat16",
    ),
    # Llama-3.1-8B
    "llama-8b": _llama(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        rope_parameters=_llama3_rope(factor=8.0),
        dtype="bfloat16",
    ),
    # for tests on CPU
    "llama-tiny": _llama(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters=_rope(500000.0),
        dtype="float32",
    ),
    # for tests with vLLM, which on CPU supports no heads narrower than 32
    "llama-tiny-wide": _llama(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=512,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters=_rope(500000.0),
        dtype="float32",
    ),
    # Qwen3-8B
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40960,
        "rope_parameters": _rope(1000000.0),
        **_QWEN3_8B,
    },
    # Qwen3-VL-8B: the decoder of Qwen3-8B and a vision tower
    "qwen3-vl-8b": _vision_model(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {**_QWEN3_VL, **_QWEN3_8B},
        {**_QWEN3_VL_TOWER, "out_hidden_size": 4096},
    ),
    # Qwen3-30B-A3B
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "max_position_embeddings": 40960,
        "rope_parameters": _rope(1000000.0),
        **_QWEN3_30B_A3B,
    },
    # Qwen3-235B-A22B
    "qwen3-235b-a22b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "max_position_embeddings": 40960,
        "rope_parameters": _rope(1000000.0),
        **_QWEN3_30B_A3B,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    # Qwen3-VL-30B-A3B: the decoder of Qwen3-30B-A3B and the vision tower of Qwen3-VL-8B
    "qwen3-vl-30b-a3b": _vision_model(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {**_QWEN3_VL, **_QWEN3_30B_A3B},
        {**_QWEN3_VL_TOWER, "out_hidden_size": 2048},
    ),
    # Qwen3.5-35B-A3B, and Qwen3.6-35B-A3B: three layers of linear attention, then one of full attention
    "qwen3.5-35b-a3b": _vision_model(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "layer_types": 10 * [*3 * ["linear_attention"], "full_attention"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 248320,
            "tie_word_embeddings": False,
            "max_position_embeddings": 262144,
            "rope_parameters": _rope(
                10000000.0, mrope_section=[11, 11, 10], mrope_interleaved=True, partial_rotary_factor=0.25
            ),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "dtype": "bfloat16",
        },
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
        },
    ),
    # for tests on CPU
    "qwen3-moe-tiny": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "rope_parameters": _rope(10000.0),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        **_QWEN_TINY,
    },
    # gpt-oss-20b, with weights in bf16 instead of mxfp4
    "gpt-oss-20b": _gpt_oss(
        24,
        4096,
        hidden_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_local_experts=32,
        vocab_size=201088,
        sliding_window=128,
        max_position_embeddings=131072,
        initializer_range=0.02,
        dtype="bfloat16",
    ),
    # for tests on CPU
    "gpt-oss-tiny": _gpt_oss(
        2,
        64,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=32,
        num_local_experts=8,
        vocab_size=512,
        sliding_window=16,
        max_position_embeddings=2048,
        initializer_range=0.1,
        dtype="float32",
    ),
    "mixtral-tiny": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_parameters": _rope(10000.0),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        **_QWEN_TINY,
    },
    "olmoe-tiny": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "rope_parameters": _rope(10000.0),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        **_QWEN_TINY,
    },
    # heads have keys that are 48 wide, and values of 32
    "deepseek-v3-tiny": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rope_parameters": _rope(10000.0),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        **_QWEN_TINY,
        "num_key_value_heads": 2,
    },
    # for tests on CPU: the text model beside qwen3-vl-tiny, and one model of each family that reads images
    "qwen3-tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_parameters": _rope(10000.0),
        **_QWEN_TINY,
    },
    "qwen2.5-vl-tiny": _vision_model(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {"rope_parameters": _rope(10000.0, mrope_section=[4, 6, 6]), **_QWEN_TINY},
        {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56, **_TINY_TOWER},
    ),
    "qwen3-vl-tiny": _vision_model(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "head_dim": 32,
            "rope_parameters": _rope(10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True),
            **_QWEN_TINY,
        },
        {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, **_TINY_TOWER},
    ),
    "qwen3-vl-moe-tiny": _vision_model(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {
            "head_dim": 32,
            "rope_parameters": _rope(10000.0, mrope_section=[6, 5, 5], mrope_interleaved=True),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,  # vLLM reads it; Transformers knows no other value
            **_QWEN_TINY,
        },
        {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, **_TINY_TOWER},
    ),
    "qwen3.5-tiny": _vision_model(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {
            **_LINEAR_TINY,
            **_QWEN_TINY,
        },
        {"patch_size": 16, "num_position_embeddings": 64, **_TINY_TOWER},
    ),
    "qwen3.5-moe-tiny": _vision_model(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **_LINEAR_TINY,
            **_QWEN_TINY,
        },
        {"patch_size": 16, "num_position_embeddings": 64, **_TINY_TOWER},
    ),
}


def patch_size(config: Mapping[str, object]) -> int | None:
    """Return the pixels on a side of an image's patch; None for a model that reads text only."""
    vision = config.get("vision_config")
    size = vision["patch_size"] if isinstance(vision, dict) else None
    assert size is None or isinstance(size, int)
    return size
