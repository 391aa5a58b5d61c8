"""GRPO of one of several adapters, on Ray: the calls of the existing script grpo/short_math_grpo_multi_lora.py.

The model is a MultiLoraMegatronModel; every call names the adapter, which reaches the sampler as a saved folder.
"""

from typing import Any

import swanlab
from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.cli import CLI
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.metric import CompletionRewardMetric
from twinkle.model import MultiLoraMegatronModel
from twinkle.preprocessor.llm import GSM8KProcessor
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward
from twinkle.reward.base import Reward
from twinkle.sampler import vLLMSampler

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3.5-4B"
DATASET_ID = args.dataset.dataset_id or "ms://modelscope/gsm8k"
MODEL_GPUS = args.infra.model_gpus or 4
SAMPLER_GPUS = args.infra.sampler_gpus or 4
NUM_GPUS = MODEL_GPUS + SAMPLER_GPUS
MODEL_RANKS = list(range(MODEL_GPUS))
SAMPLER_RANKS = list(range(MODEL_GPUS, NUM_GPUS))
DEVICE_TYPE = "GPU"
ROWS = 2000
NUM_GENERATIONS = args.rl.num_generations
MAX_NEW_TOKENS = args.sampling.max_tokens or 4096
BATCH_SIZE = args.training.batch_size
MINI_BATCH_SIZE = args.training.mini_batch_size or BATCH_SIZE * NUM_GENERATIONS
MAX_STEPS = args.training.max_steps
ADAPTER_NAME = "default"
SYSTEM_PROMPT = "Solve the problem with few words. Put the final answer within \\boxed{}."


class BrevityReward(Reward):
    """Rewards short completions that have a boxed answer."""

    def __call__(self, trajectories: list[dict[str, Any]], **kwargs: Any) -> list[float]:
        rewards = []
        for trajectory in trajectories:
            texts = [str(m.get("content", "")) for m in trajectory.get("messages", []) if m.get("role") == "assistant"]
            text = texts[-1] if texts else ""
            rewards.append(max(0.0, 1.0 - len(text) / 200) if "\\boxed{" in text else 0.0)
        return rewards


def create_gsm8k_dataset() -> Dataset:
    dataset = Dataset(DatasetMeta(DATASET_ID, subset_name="main", split="train", data_slice=range(ROWS)))
    dataset.set_template(
        "Qwen3_5Template", model_id=MODEL_ID, max_length=args.template.max_length, enable_thinking=False
    )
    dataset.map(GSM8KProcessor(system=SYSTEM_PROMPT))
    dataset.encode(add_generation_prompt=True)
    return dataset


def compute_rewards(trajectories: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    accuracy = GSM8KAccuracyReward()(trajectories)
    brevity = BrevityReward()(trajectories)
    return [a + b for a, b in zip(accuracy, brevity, strict=True)], accuracy, brevity


def create_model(mesh: DeviceMesh) -> MultiLoraMegatronModel:
    model = MultiLoraMegatronModel(
        model_id=MODEL_ID,
        device_mesh=mesh,
        remote_group="model",
        mixed_precision=args.model.mixed_precision,
        max_loras=1,
        max_r=args.lora.lora_r,
    )
    lora_config = LoraConfig(
        target_modules="all-linear",
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        lora_dropout=args.lora.lora_dropout,
    )
    rate = args.optimizer.learning_rate
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=1)
    model.set_optimizer("default", lr=rate, adapter_name=ADAPTER_NAME)
    model.set_lr_scheduler("default", lr_decay_steps=MAX_STEPS, max_lr=rate, adapter_name=ADAPTER_NAME)
    model.set_loss("GRPOLoss", epsilon=args.loss.epsilon, adapter_name=ADAPTER_NAME)
    model.set_processor(InputProcessor, padding_free=True, adapter_name=ADAPTER_NAME)
    model.set_template("Qwen3_5Template", model_id=MODEL_ID, adapter_name=ADAPTER_NAME)
    return model


def main() -> None:
    swanlab.init(project="twinkle", experiment_name="short_math_grpo_multi_lora")
    device_groups = [
        DeviceGroup(name="model", ranks=MODEL_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="sampler", ranks=SAMPLER_RANKS, device_type=DEVICE_TYPE),
    ]
    model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS // 2, pp_size=2)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)
    twinkle.initialize(mode="ray", nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)

    model = create_model(model_mesh)
    sampler = vLLMSampler(
        model_id=MODEL_ID,
        engine_args={
            "gpu_memory_utilization": args.sampler.gpu_memory_utilization,
            "max_model_len": args.sampler.max_model_len or 8192,
            "max_lora_rank": args.sampler.max_lora_rank,
            "enable_lora": True,
        },
        device_mesh=sampler_mesh,
        remote_group="sampler",
    )
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID, enable_thinking=False)
    dataloader = DataLoader(
        dataset=create_gsm8k_dataset,
        batch_size=BATCH_SIZE,
        min_batch_size=BATCH_SIZE,
        device_mesh=model_mesh,
        remote_group="model",
    )
    advantage_fn = GRPOAdvantage()
    metrics = CompletionRewardMetric()
    sampling_params = SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=1, logprobs=1)

    logger.info(get_device_placement())
    logger.info(model.get_train_configs(adapter_name=ADAPTER_NAME))
    optim_step = 0
    for batch in dataloader:
        if optim_step >= MAX_STEPS:
            break
        metrics.reset()
        adapter_path = model.save(
            f"sampled-{optim_step}", output_dir=args.training.output_dir, adapter_name=ADAPTER_NAME
        )
        sampler.reset_prefix_cache()
        expanded = [prompt for prompt in batch for _ in range(NUM_GENERATIONS)]
        responses = sampler.sample(expanded, sampling_params, adapter_path=adapter_path)

        inputs, old_logps, lengths = [], [], []
        for response in responses:
            for sequence in response.sequences:
                inputs.append(sequence.new_input_feature)
                old_logps.append([logprob[0][1] for logprob in sequence.logprobs])
                lengths.append(len(sequence.tokens))
        total, accuracy, brevity = compute_rewards(inputs)
        metrics.accumulate(
            completion_lengths=lengths, rewards={"total": total, "accuracy": accuracy, "brevity": brevity}
        )
        advantages = advantage_fn(total, num_generations=NUM_GENERATIONS, scale="group").tolist()
        for start in range(0, len(inputs), MINI_BATCH_SIZE):
            part = slice(start, start + MINI_BATCH_SIZE)
            model.forward_backward(
                inputs=inputs[part],
                old_logps=old_logps[part],
                advantages=advantages[part],
                micro_batch_size=args.training.micro_batch_size,
                adapter_name=ADAPTER_NAME,
            )
            model.clip_grad_and_step(adapter_name=ADAPTER_NAME)
            optim_step += 1
            if optim_step % args.training.save_steps == 0:
                name = f"math-grpo-checkpoint-{optim_step}"
                model.save(name, output_dir=args.training.output_dir, adapter_name=ADAPTER_NAME)
            if optim_step >= MAX_STEPS:
                break
        log = metrics.calculate()
        log.update(model.calculate_metric(is_training=True, adapter_name=ADAPTER_NAME))
        swanlab.log(log, step=optim_step)
        logger.info(f"[Step {optim_step}/{MAX_STEPS}] {log}")
    logger.info(f"Training completed. optim_steps={optim_step}")
    model.save("math-grpo-final", output_dir=args.training.output_dir, adapter_name=ADAPTER_NAME)


if __name__ == "__main__":
    main()
