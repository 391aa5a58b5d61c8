"""Distillation from given answers, on Ray: the call sequence of the existing script cookbook/rl/gkd/gkd_off_policy.py.

The teacher, a vLLMSampler, scores whole conversations; the student, a MegatronModel with an adapter, learns from its
likeliest tokens at each position.
"""

from typing import Any

import torch
from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.cli import CLI
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.loss import GKDLoss
from twinkle.model import MegatronModel
from twinkle.preprocessor.llm import GSM8KProcessor
from twinkle.processor import InputProcessor
from twinkle.sampler import vLLMSampler
from twinkle.template import Template

logger = get_logger()
args = CLI.from_args()

STUDENT_MODEL_ID = args.rl.student_model_id or args.model.model_id or "ms://Qwen/Qwen3-0.6B"
TEACHER_MODEL_ID = args.rl.teacher_model_id or args.model.model_id or "ms://Qwen/Qwen3-8B"
DATASET_ID = args.dataset.dataset_id or "ms://modelscope/gsm8k"
MODEL_GPUS = args.infra.model_gpus or 4
SAMPLER_GPUS = args.infra.sampler_gpus or 4
NUM_GPUS = MODEL_GPUS + SAMPLER_GPUS
MODEL_RANKS = list(range(MODEL_GPUS))
SAMPLER_RANKS = list(range(MODEL_GPUS, NUM_GPUS))
DEVICE_TYPE = "GPU"
ROWS = 2000
TOPK = args.rl.gkd_topk
MAX_STEPS = args.training.max_steps
ADAPTER_NAME = "default"


def create_dataset() -> Dataset:
    """Return conversations with their answers, not encoded: the teacher's template does that."""
    dataset = Dataset(DatasetMeta(DATASET_ID, subset_name="main", split="train", data_slice=range(ROWS)))
    dataset.set_template("Template", model_id=STUDENT_MODEL_ID, max_length=args.template.max_length)
    dataset.map(GSM8KProcessor(add_assistant=True))
    return dataset


def teacher_topk(responses: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the teacher's likeliest tokens (B, T, K), rolled so that position t holds those for token t + 1."""
    longest = max(len(response.topk_prompt_logprobs) for response in responses)
    logprobs = torch.zeros(len(responses), longest, TOPK)
    indices = torch.zeros(len(responses), longest, TOPK, dtype=torch.long)
    for row, response in enumerate(responses):
        for position, best in enumerate(response.topk_prompt_logprobs):
            if best is not None:
                indices[row, position] = torch.tensor([token for token, _ in best])
                logprobs[row, position] = torch.tensor([logprob for _, logprob in best])
    return logprobs.roll(-1, dims=1), indices.roll(-1, dims=1)


def main() -> None:
    device_groups = [
        DeviceGroup(name="student", ranks=MODEL_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="teacher", ranks=SAMPLER_RANKS, device_type=DEVICE_TYPE),
    ]
    model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS // 2, tp_size=2)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)
    twinkle.initialize(mode="ray", nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)

    rate = args.optimizer.learning_rate
    model = MegatronModel(
        model_id=STUDENT_MODEL_ID,
        device_mesh=model_mesh,
        remote_group="student",
        mixed_precision=args.model.mixed_precision,
    )
    lora_config = LoraConfig(
        target_modules="all-linear",
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        lora_dropout=args.lora.lora_dropout,
    )
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=1)
    model.set_optimizer("default", lr=rate)
    model.set_lr_scheduler("default", lr_decay_steps=MAX_STEPS, max_lr=rate)
    model.set_loss(GKDLoss(beta=args.rl.gkd_beta, temperature=args.rl.gkd_temperature))
    model.set_processor(InputProcessor)
    model.set_template("Template", model_id=STUDENT_MODEL_ID)

    teacher = vLLMSampler(
        model_id=TEACHER_MODEL_ID,
        engine_args={
            "gpu_memory_utilization": args.sampler.gpu_memory_utilization,
            "max_model_len": args.sampler.max_model_len or 8192,
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": 64,
        },
        device_mesh=sampler_mesh,
        remote_group="teacher",
    )
    teacher.set_template(Template, model_id=TEACHER_MODEL_ID)
    dataloader = DataLoader(
        dataset=create_dataset,
        batch_size=args.training.batch_size,
        min_batch_size=args.training.batch_size,
        device_mesh=model_mesh,
        remote_group="student",
    )
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())
    step = 0
    for batch in dataloader:
        if step >= MAX_STEPS:
            break
        responses = teacher.sample(batch, SamplingParams(max_tokens=0, prompt_logprobs=TOPK))
        inputs = [sequence.new_input_feature for response in responses for sequence in response.sequences]
        logprobs, indices = teacher_topk(responses)
        model.forward_backward(inputs=inputs, teacher_topk_logprobs=logprobs, teacher_topk_indices=indices)
        model.clip_grad_and_step()
        step += 1
        if step % args.training.log_interval == 0:
            logger.info(f"[Step {step}/{MAX_STEPS}] {model.calculate_metric(is_training=True)}")
        if step % args.training.save_steps == 0:
            model.save(f"gkd-checkpoint-{step}", output_dir=args.training.output_dir)
    logger.info(f"Training completed. Total steps: {step}")
    model.save("gkd-final", output_dir=args.training.output_dir)


if __name__ == "__main__":
    main()
