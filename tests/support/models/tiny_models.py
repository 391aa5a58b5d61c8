"""Tiny random decoders, at least one for each model family, and trainers on them.

All vectors (norms, biases) are random too. If they kept their initial ones and zeros, a test would not notice that one
was left out.
"""

import copy
from collections.abc import Callable, Mapping

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.models.reference import random_datum
from twinkle.model import AdamParams, LoraSpec, Trainer, TrainFailure, TrainItem, TrainResult, adopt_model

VOCAB = 97
WINDOW = 8  # of sliding attention; the tests' sequences are longer
LONG = 16  # beyond this length longrope uses other frequencies

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(name: str, **values: object) -> PreTrainedConfig:
    return getattr(transformers, name)(**{**_SIZES, **values})


def _qwen3_5(name: str = "Qwen3_5TextConfig", **experts: int) -> PreTrainedConfig:
    return tiny_config(
        name,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        **experts,
    )


def _qwen3_5_moe() -> PreTrainedConfig:
    return _qwen3_5(
        "Qwen3_5MoeTextConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
    )


def _gemma3() -> PreTrainedConfig:
    return tiny_config(
        "Gemma3TextConfig",
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    )


def _gpt_oss() -> PreTrainedConfig:
    """Return gpt-oss with a limit of its activations that random ones reach."""
    return tiny_config(
        "GptOssConfig",
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=6,
        num_experts_per_tok=4,
        swiglu_limit=0.3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    )


def _phi3_longrope() -> PreTrainedConfig:
    return tiny_config(
        "Phi3Config",
        original_max_position_embeddings=LONG,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [4.0, 5.0, 6.0, 7.0],
            "original_max_position_embeddings": LONG,
        },
    )


FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: tiny_config("LlamaConfig"),
    "llama-tied": lambda: tiny_config("LlamaConfig", tie_word_embeddings=True),
    "qwen2": lambda: tiny_config("Qwen2Config"),
    "qwen2-sliding": lambda: tiny_config(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen3": lambda: tiny_config("Qwen3Config", head_dim=16),
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma": lambda: tiny_config("GemmaConfig", head_dim=16, num_key_value_heads=1),
    "gemma2": lambda: tiny_config(
        "Gemma2Config",
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _gemma3,
    "mistral": lambda: tiny_config("MistralConfig", sliding_window=WINDOW),
    "phi": lambda: tiny_config("PhiConfig", num_key_value_heads=4, partial_rotary_factor=0.5),
    "phi3": lambda: tiny_config("Phi3Config"),
    "phi3-sliding": lambda: tiny_config("Phi3Config", sliding_window=WINDOW),
    "phi3-longrope": _phi3_longrope,
    "qwen3_moe": lambda: tiny_config(
        "Qwen3MoeConfig", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt_oss": _gpt_oss,
}


# Models that run padded: their short convolutions do not know where the sequences of a packed row begin.
PADDED_FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: tiny_config(
        "Lfm2Config", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, tie_word_embeddings=False
    ),
}


# Models whose experts adapters can train. DeepSeek-V3's first layer has none, and its experts come in two groups.
EXPERT_FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "gpt_oss": FAMILIES["gpt_oss"],
    "qwen3_5_moe": _qwen3_5_moe,
    "mixtral": lambda: tiny_config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "olmoe": lambda: tiny_config("OlmoeConfig", num_experts=6, num_experts_per_tok=3),
    "deepseek_v3": lambda: tiny_config(
        "DeepseekV3Config",
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_key_value_heads=4,
    ),
}


WITH_EXPERTS = frozenset(FAMILIES.keys() & EXPERT_FAMILIES.keys())


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    return random_model((FAMILIES | PADDED_FAMILIES | EXPERT_FAMILIES)[family](), seed)


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    draw_lasting_decay(parameter)
                elif parameter.ndim == 1 or name.endswith("_bias"):  # the latter of all experts of a layer
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def draw_lasting_decay(logarithm: torch.Tensor) -> None:
    """Let the states of a layer of linear attention last for many tokens.

    Those of a fresh model vanish within one, and Transformers computes what is left of them in fp32 from numbers in the
    hundreds.
    """
    logarithm.copy_(torch.rand_like(logarithm).mul_(0.4).add_(0.05).log_())


def tiny_trainer(model: PreTrainedModel, **options: int) -> Trainer:
    """Return a trainer on a copy of the model; the given model stays unchanged."""
    return Trainer(adopt_model(copy.deepcopy(model)), model_id="tiny", **options)


def add_trained_adapter(trainer: Trainer, adapter_id: str, spec: LoraSpec, model: PreTrainedModel) -> None:
    """Create an adapter and take one large step, after which no element of B is zero."""
    trainer.create_adapter(adapter_id, spec)
    take_step(trainer, TrainItem(adapter_id, [random_datum(model, "cross_entropy", 11, seed=spec.rank)]), 0.02)


def take_step(trainer: Trainer, item: TrainItem, learning_rate: float = 1e-3) -> TrainResult:
    result = the_result(trainer.forward_backward([item])[0])
    trainer.optim_step(item.adapter_id, AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0))
    return result


def the_result(outcome: TrainResult | TrainFailure) -> TrainResult:
    assert isinstance(outcome, TrainResult), outcome
    return outcome
