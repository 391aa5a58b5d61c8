"""The scripts of the existing Twinkle: which of them run here, and which feature each of the others waits for.

Local scripts are below ``cookbook/``, client scripts below ``cookbook/client/``. ``ours`` is our script with the same
calls, below this folder.
"""

from dataclasses import dataclass

IMAGES = "pictures in the stand-in for a hub"
EXPERTS = "answers of the model with experts in the stand-in for a hub"
TARGET_PARAMETERS = "`target_parameters` of multi-LoRA models"
EXPERT_ADAPTERS = "adapters on experts in models of Megatron"


@dataclass(frozen=True)
class Existing:
    path: str
    ours: str | None = None
    waits_for: str | None = None


LOCAL = (
    Existing("transformers/fsdp2.py", ours="local/fsdp2.py"),
    Existing("transformers/sp_fsdp_dense.py", ours="local/sp_fsdp_dense.py"),
    Existing("transformers/ep_fsdp2_lora_qwen3_5_moe.py", ours="local/ep_fsdp2_lora_qwen3_5_moe.py"),
    Existing("transformers/ep_fsdp2_lora_deepseek_v4.py", ours="local/ep_fsdp2_lora_deepseek_v4.py"),
    Existing("transformers/ep_fsdp2_multi_lora_deepseek_v4.py", waits_for=TARGET_PARAMETERS),
    Existing("megatron/tp.py", ours="local/tp.py"),
    Existing("megatron/tp_moe.py", ours="local/tp_moe.py"),
    Existing("rl/dpo/dpo_full.py", ours="local/dpo_full.py"),
    Existing("rl/dpo/dpo_lora.py", ours="local/dpo_lora.py"),
    Existing("rl/dpo/dpo_multi_lora.py", ours="local/dpo_multi_lora.py"),
    Existing("rl/gkd/gkd_off_policy.py", ours="local/gkd_off_policy.py"),
    Existing("rl/gkd/gkd_on_policy.py", ours="local/gkd_on_policy.py"),
    Existing("rl/grpo/grpo.py", ours="local/grpo.py"),
    Existing("rl/grpo/grpo_mm.py", waits_for=IMAGES),
    Existing("rl/grpo/short_math_grpo.py", ours="local/short_math_grpo.py"),
    Existing("rl/grpo/short_math_grpo_moe.py", waits_for=EXPERT_ADAPTERS),
    Existing("rl/grpo/short_math_grpo_multi_lora.py", ours="local/short_math_grpo_multi_lora.py"),
    Existing("rl/grpo/short_math_grpo_routing_replay.py", waits_for=EXPERTS),
    Existing("rl/multi_turn/multi_turn_grpo.py", ours="local/multi_turn_grpo.py"),
    Existing("rl/ppo/ppo.py", ours="local/ppo.py"),
)
CLIENT = (
    Existing("twinkle/self_cognition.py", ours="client/twinkle/self_cognition.py"),
    Existing("twinkle/dpo.py", ours="client/twinkle/dpo.py"),
    Existing("twinkle/short_math_grpo.py", ours="client/twinkle/short_math_grpo.py"),
    Existing("twinkle/multi_turn_rollout.py", ours="client/twinkle/multi_turn_rollout.py"),
    Existing("twinkle/multi_modal.py", waits_for=IMAGES),
    Existing("twinkle/embedding.py", ours="client/twinkle/embedding.py"),
    Existing("twinkle/sample.py", ours="client/twinkle/sample.py"),
    Existing("twinkle/upload_to_hub.py", ours="client/twinkle/upload_to_hub.py"),
    Existing("tinker/lora.py", ours="client/tinker/lora.py"),
    Existing("tinker/self_cognition.py", ours="client/tinker/self_cognition.py"),
    Existing("tinker/dpo.py", ours="client/tinker/dpo.py"),
    Existing("tinker/short_math_grpo.py", ours="client/tinker/short_math_grpo.py"),
    Existing("tinker/multi_modal.py", waits_for=IMAGES),
    Existing("tinker/sample.py", ours="client/tinker/sample.py"),
    Existing("tinker/upload_to_hub.py", ours="client/tinker/upload_to_hub.py"),
)
