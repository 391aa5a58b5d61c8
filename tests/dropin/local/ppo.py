"""PPO with a critic on word problems, on Ray: the call sequence of the existing script cookbook/rl/ppo/ppo.py.

The policy has a LoRA adapter, all parameters of the critic are trained, and each has a group of its own. Rewards are
compared with the critic's values by GAE.
"""

import random
from typing import Any

import torch
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.advantage import GAEAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.cli import CLI
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.metric import CompletionRewardMetric, PPOMetric, PPOValueMetric
from twinkle.model import TransformersModel, TransformersValueModel
from twinkle.preprocessor.llm import GSM8KProcessor
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.sampler import vLLMSampler

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3-4B"
DATASET_ID = args.dataset.dataset_id or "ms://modelscope/gsm8k"
POLICY_GPUS = args.infra.model_gpus or 4
CRITIC_GPUS = args.infra.critic_model_gpus or 4
SAMPLER_GPUS = args.infra.sampler_gpus or 4
NUM_GPUS = POLICY_GPUS + CRITIC_GPUS + SAMPLER_GPUS
POLICY_RANKS = list(range(POLICY_GPUS))
CRITIC_RANKS = list(range(POLICY_GPUS, POLICY_GPUS + CRITIC_GPUS))
SAMPLER_RANKS = list(range(POLICY_GPUS + CRITIC_GPUS, NUM_GPUS))
DEVICE_TYPE = "GPU"
ROWS = 2000
NUM_GENERATIONS = args.rl.num_generations
MAX_NEW_TOKENS = args.sampling.max_tokens or 1024
BATCH_SIZE = args.training.batch_size
MINI_BATCH_SIZE = args.training.mini_batch_size or BATCH_SIZE * NUM_GENERATIONS
MICRO_BATCH_SIZE = args.training.micro_batch_size
PPO_EPOCHS = args.training.num_train_epochs or 4
MAX_STEPS = args.training.max_steps
UPDATES = MAX_STEPS * PPO_EPOCHS * -(-BATCH_SIZE * NUM_GENERATIONS // MINI_BATCH_SIZE)
LOSS_AGG_MODE = "token-mean"
IGNORE_INDEX = -100
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def create_gsm8k_dataset() -> Dataset:
    dataset = Dataset(DatasetMeta(DATASET_ID, subset_name="main", split="train", data_slice=range(ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=args.template.max_length)
    dataset.map(GSM8KProcessor())
    dataset.encode(add_generation_prompt=True)
    return dataset


def compute_rewards(trajectories: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    accuracy = GSM8KAccuracyReward()(trajectories)
    form = GSM8KFormatReward()(trajectories)
    return [a + f for a, f in zip(accuracy, form, strict=True)], form, accuracy


def create_policy(mesh: DeviceMesh) -> TransformersModel:
    policy = TransformersModel(model_id=MODEL_ID, device_mesh=mesh, remote_group="policy", strategy=args.model.strategy)
    lora_config = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules=TARGET_MODULES)
    policy.add_adapter_to_model("default", lora_config, gradient_accumulation_steps=1)
    policy.set_optimizer("AdamW", lr=args.optimizer.learning_rate)
    policy.set_lr_scheduler("CosineAnnealingLR", T_max=UPDATES, eta_min=0)
    policy.set_loss(
        "PPOLoss", epsilon=args.loss.epsilon, entropy_coef=args.loss.entropy_coef, loss_agg_mode=LOSS_AGG_MODE
    )
    policy.add_metric(PPOMetric, epsilon=args.loss.epsilon)
    policy.set_processor(InputProcessor)
    policy.set_template("Template", model_id=MODEL_ID)
    return policy


def create_critic(mesh: DeviceMesh) -> TransformersValueModel:
    critic = TransformersValueModel(
        model_id=MODEL_ID, device_mesh=mesh, remote_group="critic", strategy=args.model.strategy
    )
    critic.set_optimizer("AdamW", lr=args.rl.critic_learning_rate)
    critic.set_loss("PPOValueLoss", epsilon=args.loss.value_clip)
    critic.set_lr_scheduler("CosineAnnealingLR", T_max=UPDATES, eta_min=0)
    critic.add_metric(PPOValueMetric, epsilon=args.loss.value_clip)
    critic.set_processor(InputProcessor)
    critic.set_template("Template", model_id=MODEL_ID)
    return critic


def create_sampler(mesh: DeviceMesh) -> vLLMSampler:
    sampler = vLLMSampler(
        model_id=MODEL_ID,
        engine_args={
            "gpu_memory_utilization": args.sampler.gpu_memory_utilization,
            "max_model_len": args.sampler.max_model_len or 4096,
            "max_lora_rank": args.sampler.max_lora_rank,
            "enable_lora": True,
        },
        device_mesh=mesh,
        remote_group="sampler",
    )
    sampler.set_template("Template", model_id=MODEL_ID)
    return sampler


def response_rows(table: Any, inputs: list[dict[str, Any]]) -> list[list[float]]:
    """Cut each row of a table [B, T] at the positions of its sampled tokens."""
    rows = []
    for values, feature in zip(table, inputs, strict=True):
        labels = torch.as_tensor(feature["labels"])
        rows.append(torch.as_tensor(values)[: len(labels)][labels != IGNORE_INDEX].float().tolist())
    return rows


def pad_rows(rows: list[list[float]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def main() -> None:
    device_groups = [
        DeviceGroup(name="policy", ranks=POLICY_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="critic", ranks=CRITIC_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="sampler", ranks=SAMPLER_RANKS, device_type=DEVICE_TYPE),
    ]
    policy_mesh = DeviceMesh.from_sizes(world_size=POLICY_GPUS, fsdp_size=POLICY_GPUS)
    critic_mesh = DeviceMesh.from_sizes(world_size=CRITIC_GPUS, fsdp_size=CRITIC_GPUS)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)
    twinkle.initialize(mode="ray", nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)

    policy = create_policy(policy_mesh)
    critic = create_critic(critic_mesh)
    sampler = create_sampler(sampler_mesh)
    ckpt_manager = CheckpointEngineManager(model=policy, sampler=sampler)
    dataloader = DataLoader(
        dataset=create_gsm8k_dataset,
        batch_size=BATCH_SIZE,
        min_batch_size=BATCH_SIZE,
        device_mesh=policy_mesh,
        remote_group="policy",
    )
    gae = GAEAdvantage(gamma=args.rl.gamma, gae_lambda=args.rl.gae_lambda, normalize=args.rl.normalize_advantages)
    metrics = CompletionRewardMetric()
    sampling_params = SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=1, logprobs=1)

    logger.info(get_device_placement())
    step = 0
    for batch in dataloader:
        if step >= MAX_STEPS:
            break
        metrics.reset()
        ckpt_manager.sync_weights(merge_and_sync=False)
        sampler.reset_prefix_cache()
        responses = sampler.sample([prompt for prompt in batch for _ in range(NUM_GENERATIONS)], sampling_params)
        inputs, old_logps, lengths = [], [], []
        for response in responses:
            for sequence in response.sequences:
                inputs.append(sequence.new_input_feature)
                old_logps.append([logprob[0][1] for logprob in sequence.logprobs])
                lengths.append(len(sequence.tokens))
        total, form, accuracy = compute_rewards(inputs)
        metrics.accumulate(completion_lengths=lengths, rewards={"total": total, "format": form, "accuracy": accuracy})

        ref_logps = response_rows(policy.forward_only(inputs=inputs, disable_lora=True)["logps"], inputs)
        old_values = response_rows(critic.forward_only(inputs=inputs)["values"], inputs)
        token_rewards = gae.build_token_rewards(
            total, lengths, old_logps=old_logps, ref_logps=ref_logps, kl_coef=args.rl.kl_coef
        )
        masks = pad_rows([[1.0] * length for length in lengths])
        advantages, returns = gae(pad_rows(token_rewards), pad_rows(old_values), masks=masks)
        advantage_rows = [row[:length].tolist() for row, length in zip(advantages, lengths, strict=True)]
        return_rows = [row[:length].tolist() for row, length in zip(returns, lengths, strict=True)]

        for _ in range(PPO_EPOCHS):
            order = list(range(len(inputs)))
            random.shuffle(order)
            for start in range(0, len(order), MINI_BATCH_SIZE):
                chosen = order[start : start + MINI_BATCH_SIZE]
                policy.forward_backward(
                    inputs=[inputs[i] for i in chosen],
                    old_logps=[old_logps[i] for i in chosen],
                    advantages=[advantage_rows[i] for i in chosen],
                    micro_batch_size=MICRO_BATCH_SIZE,
                )
                policy.clip_grad_and_step()
                critic.forward_backward(
                    inputs=[inputs[i] for i in chosen],
                    old_values=[old_values[i] for i in chosen],
                    returns=[return_rows[i] for i in chosen],
                    advantages=[advantage_rows[i] for i in chosen],
                    micro_batch_size=MICRO_BATCH_SIZE,
                )
                critic.clip_grad_and_step()
        step += 1
        log = metrics.calculate()
        log.update({f"policy/{key}": value for key, value in policy.calculate_metric(is_training=True).items()})
        log.update({f"critic/{key}": value for key, value in critic.calculate_metric(is_training=True).items()})
        logger.info(f"[Step {step}/{MAX_STEPS}] {log}")
        if step % args.training.save_steps == 0:
            policy.save(f"ppo-policy-{step}", output_dir=args.training.output_dir)
            critic.save(f"ppo-critic-{step}", output_dir=args.training.output_dir)
    logger.info(f"Training completed. Total steps: {step}")


if __name__ == "__main__":
    main()
