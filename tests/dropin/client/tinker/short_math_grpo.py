"""GRPO with the tinker SDK: the call sequence of the existing script client/tinker/…/short_math_grpo.py."""

import os
from typing import Any

import dotenv

dotenv.load_dotenv(".env")

import numpy as np  # noqa: E402

from twinkle import get_logger, init_tinker_client  # noqa: E402
from twinkle.advantage import GRPOAdvantage  # noqa: E402
from twinkle.data_format import Message, Trajectory  # noqa: E402
from twinkle.dataloader import DataLoader  # noqa: E402
from twinkle.dataset import Dataset, DatasetMeta  # noqa: E402
from twinkle.metric import CompletionRewardMetric  # noqa: E402
from twinkle.preprocessor.llm import GSM8KProcessor  # noqa: E402
from twinkle.reward import GSM8KAccuracyReward  # noqa: E402
from twinkle.template import Qwen3_5Template  # noqa: E402

init_tinker_client()

from tinker import ServiceClient, types  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ROWS = 2000
NUM_GENERATIONS = 4
MAX_NEW_TOKENS = 4096
LEARNING_RATE = 2e-5
MAX_STEPS = 1000
BATCH_SIZE = 2
TEMPERATURE = 1.0
SYSTEM_PROMPT = "Solve the problem with few words. Put the final answer within \\boxed{}."


def create_gsm8k_dataset() -> Dataset:
    meta = DatasetMeta("ms://modelscope/gsm8k", subset_name="main", split="train", data_slice=range(ROWS))
    dataset = Dataset(meta)
    dataset.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", max_length=4096, truncation_strategy="delete")
    dataset.map(GSM8KProcessor(system=SYSTEM_PROMPT))
    dataset.encode(add_generation_prompt=True)
    return dataset


def trajectory_of(prompt: dict[str, Any], text: str) -> dict[str, Any]:
    messages = [message for message in prompt["messages"] if message["role"] != "assistant"]
    return Trajectory(messages=[*messages, Message(role="assistant", content=text)], user_data=prompt["user_data"])


def train() -> None:
    dataloader = DataLoader(dataset=create_gsm8k_dataset(), batch_size=BATCH_SIZE)
    template = Qwen3_5Template(model_id=f"ms://{MODEL_ID}")
    service_client = ServiceClient(base_url=BASE_URL, api_key=API_KEY)
    training_client = service_client.create_lora_training_client(base_model=MODEL_ID, rank=16)

    advantage_fn = GRPOAdvantage()
    metrics = CompletionRewardMetric()
    sampling_params = types.SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE, top_p=0.95)
    step = 0
    for batch in dataloader:
        if step >= MAX_STEPS:
            break
        metrics.reset()
        prompts = batch if isinstance(batch, list) else [batch]
        sampling_client = training_client.save_weights_and_get_sampling_client()
        futures = [
            sampling_client.sample(
                prompt=types.ModelInput.from_ints(prompt["input_ids"]),
                sampling_params=sampling_params,
                num_samples=NUM_GENERATIONS,
            )
            for prompt in prompts
        ]
        prompt_ids, sequences, trajectories = [], [], []
        for prompt, future in zip(prompts, futures, strict=True):
            for sequence in future.result().sequences:
                prompt_ids.append(list(prompt["input_ids"]))
                sequences.append(sequence)
                trajectories.append(trajectory_of(prompt, template.decode(sequence.tokens, skip_special_tokens=True)))

        rewards = GSM8KAccuracyReward()(trajectories)
        metrics.accumulate(
            completion_lengths=[len(sequence.tokens) for sequence in sequences], rewards={"accuracy": rewards}
        )
        advantages = advantage_fn(rewards, num_generations=NUM_GENERATIONS, scale="group").tolist()
        if all(abs(advantage) < 1e-8 for advantage in advantages):
            logger.info(f"Step {step}: all advantages are zero, skipping the training step")
            step += 1
            continue

        training_data = []
        for ids, sequence, advantage in zip(prompt_ids, sequences, advantages, strict=True):
            sampled = list(sequence.tokens)
            tokens = ids + sampled
            before = len(ids) - 1
            training_data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
                        "weights": types.TensorData.from_numpy(
                            np.array([0.0] * before + [1.0] * len(sampled), dtype=np.float32)
                        ),
                        "logprobs": types.TensorData.from_numpy(
                            np.array([0.0] * before + list(sequence.logprobs), dtype=np.float32)
                        ),
                        "advantages": types.TensorData.from_numpy(
                            np.array([0.0] * before + [advantage] * len(sampled), dtype=np.float32)
                        ),
                    },
                )
            )
        fwdbwd_result = training_client.forward_backward(training_data, "importance_sampling").result()
        optim_result = training_client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
        log = metrics.calculate()
        log.update(fwdbwd_result.metrics)
        log.update(optim_result.metrics or {})
        logger.info(f"Step {step}: {log}")
        step += 1
    save_result = training_client.save_state("gsm8k-grpo-final").result()
    logger.info(f"Saved final checkpoint to {save_result.path}")


if __name__ == "__main__":
    train()
