"""GRPO on a server: the call sequence of the existing script client/twinkle/…/short_math_grpo.py."""

import os
from typing import Any

import dotenv

dotenv.load_dotenv(".env")

import swanlab  # noqa: E402, F401
from peft import LoraConfig  # noqa: E402

from twinkle import get_logger, init_twinkle_client  # noqa: E402
from twinkle.advantage import GRPOAdvantage  # noqa: E402
from twinkle.dataloader import DataLoader  # noqa: E402
from twinkle.dataset import Dataset, DatasetMeta  # noqa: E402
from twinkle.metric import CompletionRewardMetric  # noqa: E402
from twinkle.preprocessor.llm import GSM8KProcessor  # noqa: E402
from twinkle.reward import GSM8KAccuracyReward  # noqa: E402
from twinkle.reward.base import Reward  # noqa: E402
from twinkle_client.model import MultiLoraTransformersModel  # noqa: E402
from twinkle_client.sampler import vLLMSampler  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ROWS = 2000
NUM_GENERATIONS = 4
MAX_NEW_TOKENS = 1024
LEARNING_RATE = 2e-5
MAX_STEPS = 100
BATCH_SIZE = 2
TEMPERATURE = 1.0
SYNC_INTERVAL = 1
SYSTEM_PROMPT = "Solve the problem with few words. Put the final answer within \\boxed{}."


class BrevityReward(Reward):
    """Rewards short completions that have a boxed answer."""

    def __call__(self, trajectories: list[dict[str, Any]], **kwargs: Any) -> list[float]:
        rewards = []
        for trajectory in trajectories:
            texts = [str(m.get("content", "")) for m in trajectory.get("messages", []) if m.get("role") == "assistant"]
            text = texts[-1] if texts else ""
            rewards.append(0.5 * max(0.0, 1.0 - len(text) / 3000) if "\\boxed{" in text else 0.0)
        return rewards


def create_gsm8k_dataset() -> Dataset:
    meta = DatasetMeta("ms://modelscope/gsm8k", subset_name="main", split="train", data_slice=range(ROWS))
    dataset = Dataset(meta)
    dataset.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", max_length=2048, enable_thinking=False)
    dataset.map(GSM8KProcessor(system=SYSTEM_PROMPT))
    dataset.encode(add_generation_prompt=True)
    return dataset


def compute_rewards(trajectories: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    accuracy = GSM8KAccuracyReward()(trajectories)
    brevity = BrevityReward()(trajectories)
    return [a + b for a, b in zip(accuracy, brevity, strict=True)], accuracy, brevity


def train() -> None:
    init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)
    dataloader = DataLoader(dataset=create_gsm8k_dataset(), batch_size=BATCH_SIZE, num_workers=0)

    model = MultiLoraTransformersModel(model_id=f"ms://{MODEL_ID}")
    lora_config = LoraConfig(target_modules="all-linear", r=8, lora_alpha=32, lora_dropout=0.05)
    model.add_adapter_to_model("default", lora_config, gradient_accumulation_steps=1)
    model.set_loss("GRPOLoss", epsilon=0.2, beta=0.0)
    model.set_optimizer("Adam", lr=LEARNING_RATE)
    model.set_processor("InputProcessor")
    model.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}")

    sampler = vLLMSampler(model_id=f"ms://{MODEL_ID}")
    sampler.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}")

    advantage_fn = GRPOAdvantage()
    metrics = CompletionRewardMetric()
    sampling_params = {
        "max_tokens": MAX_NEW_TOKENS,
        "temperature": TEMPERATURE,
        "top_p": 0.95,
        "num_samples": NUM_GENERATIONS,
        "logprobs": 1,
    }
    current_adapter_uri = None
    step = 0
    for batch in dataloader:
        if step >= MAX_STEPS:
            break
        metrics.reset()
        prompts = batch if isinstance(batch, list) else [batch]
        if step % SYNC_INTERVAL == 0:
            result = model.save(name="grpo-sampler-weights", save_optimizer=False, is_sampler=True)
            current_adapter_uri = result.twinkle_path

        responses = sampler.sample(inputs=prompts, sampling_params=sampling_params, adapter_uri=current_adapter_uri)
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
        if all(abs(advantage) < 1e-8 for advantage in advantages):
            logger.info(f"Step {step}: all advantages are zero, skipping the training step")
            step += 1
            continue
        model.forward_backward(inputs=inputs, advantages=advantages, old_logps=old_logps)
        model.clip_grad_and_step()
        log = metrics.calculate()
        log.update(model.calculate_metric(is_training=True).result)
        logger.info(f"Step {step}: {log}")
        step += 1
    result = model.save(name="grpo-countdown-final", save_optimizer=True)
    logger.info(f"Saved final checkpoint: {result.twinkle_path}")


if __name__ == "__main__":
    train()
