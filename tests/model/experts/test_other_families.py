"""Families that use Transformers' common interface of experts, beside those with tests of their own.

A trainer compares its results with the model's own when it starts; here adapters on their experts equal the formula.
"""

from collections.abc import Mapping

import pytest

from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import (
    assert_logprobs_close,
    assert_tensors_close,
    random_datum,
    with_random_weights,
)
from tests.support.models.tiny_models import random_model, the_result, tiny_config, tiny_trainer
from twinkle.errors import UnsupportedError
from twinkle.model import LoraSpec, TrainItem

_DEEPSEEK_LIKE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MIXTRAL_LIKE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
OTHERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "deepseek_v2": ("DeepseekV2Config", {**_DEEPSEEK_LIKE, **_LATENT, "head_dim": 8}),
    "dots1": ("Dots1Config", {**_DEEPSEEK_LIKE, "head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
        },
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", {**_DEEPSEEK_LIKE, "head_dim": 8}),
    "granitemoe": ("GraniteMoeConfig", _MIXTRAL_LIKE),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "minimax_m2": ("MiniMaxM2Config", {**_MIXTRAL_LIKE, "head_dim": 8}),
    "phimoe": ("PhimoeConfig", _MIXTRAL_LIKE),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 1,
        },
    ),
}
REFUSED = {"llama4_text": ("Llama4TextConfig", {**_MIXTRAL_LIKE, "head_dim": 8}, "no decoder found")}


@pytest.mark.parametrize("family", OTHERS)
def test_adapters_on_experts_equal_the_plain_formula(family: str) -> None:
    name, values = OTHERS[family]
    model = random_model(tiny_config(name, **values))
    assert model.config.model_type == family
    trainer, spec = tiny_trainer(model), LoraSpec(4, alpha=6, seed=1)
    trainer.create_adapter("a", spec)
    trainer.restore("a", with_random_weights(trainer, "a"))
    assert any(".experts.w2." in each for each in trainer.weights("a"))
    item = TrainItem("a", [random_datum(model, "cross_entropy", length, seed=length) for length in (17, 5)])
    ours, plain = the_result(trainer.forward_backward([item])[0]), ExpertsReference(model, spec, trainer.weights("a"))
    assert_logprobs_close(ours.logprobs, plain.forward_backward(item).logprobs)
    assert_tensors_close(trainer.gradients("a"), plain.gradients())


@pytest.mark.parametrize("family", REFUSED)
def test_the_rest_is_refused_by_name(family: str) -> None:
    name, values, message = REFUSED[family]
    with pytest.raises(UnsupportedError, match=f"{family}: {message}"):
        tiny_trainer(random_model(tiny_config(name, **values)))
