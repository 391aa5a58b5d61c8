"""Adapters on models with experts have the sizes that Tinker publishes."""

from collections.abc import Mapping

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from twinkle.model import LoraSpec, adopt_model
from twinkle.model.decoder.architecture import Architecture, read_architecture
from twinkle.model.decoder.targets import select_targets

# Parameters for each unit of the rank: feed-forward, attention, head.
SIZES: Mapping[str, tuple[int, int, int]] = {
    "Qwen3-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen3-235B-A22B": (56_598_528, 3_176_448, 156_032),
    "gpt-oss-20b": (6_842_880, 497_664, 203_968),
    "gpt-oss-120b": (40_124_160, 746_496, 203_968),
    "DeepSeek-V3.1": (94_307_328, 2_440_000, 136_448),
    "Kimi-K2": (144_583_680, 1_940_288, 171_008),
    "Qwen3.5-4B": (3 * 32 * (2560 + 9216), 897_024, 250_880),
    "Qwen3.5-9B": (3 * 32 * (4096 + 12288), 1_130_496, 252_416),
    "Qwen3.5-27B": (3 * 64 * (5120 + 17408), 2_965_504, 253_440),
    "Qwen3.5-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen3.5-397B-A17B": (96_030_720, 2_841_600, 252_416),
}


def qwen(layers: int, hidden: int, heads: int, width: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        moe_intermediate_size=width,
        tie_word_embeddings=False,
    )


def deepseek(dense: int, heads: int, experts: int, vocabulary: int) -> PreTrainedConfig:
    return DeepseekV3Config(
        num_hidden_layers=61,
        first_k_dense_replace=dense,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


def qwen3_5(
    layers: int, hidden: int, heads: tuple[int, int], value_heads: int, width: int, experts: int = 0
) -> PreTrainedConfig:
    """``heads``: of queries, and of keys and values. ``width``: of the feed-forward blocks, or of experts."""
    values: dict[str, object] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
    }
    if not experts:
        return Qwen3_5TextConfig(intermediate_size=width, **values)
    return Qwen3_5MoeTextConfig(
        num_experts=experts, moe_intermediate_size=width, shared_expert_intermediate_size=width, **values
    )


def architecture(name: str) -> Architecture:
    configs = {
        "Qwen3-30B-A3B": lambda: qwen(48, 2048, 32, 768),
        "Qwen3-235B-A22B": lambda: qwen(94, 4096, 64, 1536),
        "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
        "gpt-oss-120b": lambda: GptOssConfig(),
        "DeepSeek-V3.1": lambda: deepseek(3, 128, 256, 129280),
        "Kimi-K2": lambda: deepseek(1, 64, 384, 163840),
        "Qwen3.5-4B": lambda: qwen3_5(32, 2560, (16, 4), 32, 9216),
        "Qwen3.5-9B": lambda: qwen3_5(32, 4096, (16, 4), 32, 12288),
        "Qwen3.5-27B": lambda: qwen3_5(64, 5120, (24, 4), 48, 17408),
        "Qwen3.5-35B-A3B": lambda: qwen3_5(40, 2048, (16, 2), 32, 512, 256),
        "Qwen3.5-397B-A17B": lambda: qwen3_5(60, 4096, (32, 2), 64, 1024, 512),
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configs[name]())
        return read_architecture(adopt_model(model) if name.startswith("Qwen3.5") else model)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_tinker(name: str) -> None:
    model = architecture(name)
    for switch, size in zip(("train_mlp", "train_attn", "train_unembed"), SIZES[name], strict=True):
        switches = dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False) | {switch: True}
        targets = select_targets(LoraSpec(rank=1, **switches), model)
        assert sum(target.a_rows + target.b_rows for target in targets) == size, switch
