"""Distillation from the student's own answers, on Ray: the calls of the existing script rl/gkd/gkd_on_policy.py.

The student's weights go to its sampler before each batch. The teacher scores what the student has sampled. The existing
script's three subsets have images; here they are texts.
"""

from typing import Any

import torch
from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.cli import CLI
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, LazyDataset
from twinkle.loss import GKDLoss
from twinkle.model import MegatronModel
from twinkle.preprocessor.llm import GSM8KProcessor
from twinkle.processor import InputProcessor
from twinkle.sampler import vLLMSampler

logger = get_logger()
args = CLI.from_args()

STUDENT_MODEL_ID = args.rl.student_model_id or args.model.model_id or "ms://Qwen/Qwen3.5-4B"
TEACHER_MODEL_ID = args.rl.teacher_model_id or args.model.model_id or "ms://Qwen/Qwen3.5-9B"
DATASET_ID = args.dataset.dataset_id or "ms://modelscope/gsm8k"
MODEL_GPUS = args.infra.model_gpus or 4
SAMPLER_GPUS = args.infra.sampler_gpus or 2
NUM_GPUS = MODEL_GPUS + 2 * SAMPLER_GPUS
MODEL_RANKS = list(range(MODEL_GPUS))
STUDENT_RANKS = list(range(MODEL_GPUS, MODEL_GPUS + SAMPLER_GPUS))
TEACHER_RANKS = list(range(MODEL_GPUS + SAMPLER_GPUS, NUM_GPUS))
DEVICE_TYPE = "GPU"
ROWS = 1000  # of each subset
TOPK = args.rl.gkd_topk
MAX_NEW_TOKENS = args.sampling.max_tokens or 1024
MAX_STEPS = args.training.max_steps
ADAPTER_NAME = "default"


def create_dataset() -> LazyDataset:
    """Return three mixed subsets, not encoded."""
    subsets = [
        DatasetMeta(DATASET_ID, subset_name=name, split=split, data_slice=range(ROWS))
        for name, split in (("main", "train"), ("socratic", "train"), ("main", "test"))
    ]
    dataset = LazyDataset(subsets[0])
    dataset.map(GSM8KProcessor(), dataset_meta=subsets[0])
    for subset in subsets[1:]:
        dataset.add_dataset(subset)
        dataset.map(GSM8KProcessor(), dataset_meta=subset)
    dataset.mix_dataset(interleave=True)
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


def create_model(mesh: DeviceMesh) -> MegatronModel:
    model = MegatronModel(
        model_id=STUDENT_MODEL_ID,
        device_mesh=mesh,
        remote_group="model",
        mixed_precision=args.model.mixed_precision,
    )
    lora_config = LoraConfig(
        target_modules="all-linear",
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        lora_dropout=args.lora.lora_dropout,
    )
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=1)
    model.set_optimizer("default", lr=args.optimizer.learning_rate)
    model.set_lr_scheduler("default", lr_decay_steps=MAX_STEPS, max_lr=args.optimizer.learning_rate)
    model.set_loss(GKDLoss(beta=args.rl.gkd_beta, temperature=args.rl.gkd_temperature))
    model.set_processor(InputProcessor)
    model.set_template("Qwen3_5Template", model_id=STUDENT_MODEL_ID)
    return model


def create_sampler(model_id: str, group: str, mesh: DeviceMesh, **engine_args: Any) -> vLLMSampler:
    options = {
        "gpu_memory_utilization": args.sampler.gpu_memory_utilization,
        "max_model_len": args.sampler.max_model_len or 8192,
        **engine_args,
    }
    sampler = vLLMSampler(model_id=model_id, engine_args=options, device_mesh=mesh, remote_group=group)
    sampler.set_template("Qwen3_5Template", model_id=model_id, enable_thinking=False)
    return sampler


def main() -> None:
    device_groups = [
        DeviceGroup(name="model", ranks=MODEL_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="student", ranks=STUDENT_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="teacher", ranks=TEACHER_RANKS, device_type=DEVICE_TYPE),
    ]
    model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS // 2, pp_size=2)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)
    twinkle.initialize(mode="ray", nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)

    model = create_model(model_mesh)
    lora = {"enable_lora": True, "max_lora_rank": args.sampler.max_lora_rank}
    student = create_sampler(STUDENT_MODEL_ID, "student", sampler_mesh, **lora)
    teacher = create_sampler(TEACHER_MODEL_ID, "teacher", sampler_mesh, logprobs_mode="raw_logprobs", max_logprobs=64)
    ckpt_manager = CheckpointEngineManager(model=model, sampler=student)
    dataloader = DataLoader(
        dataset=create_dataset,
        batch_size=args.training.batch_size,
        min_batch_size=args.training.batch_size,
        device_mesh=model_mesh,
        remote_group="model",
    )
    logger.info(get_device_placement())
    step = 0
    for batch in dataloader:
        if step >= MAX_STEPS:
            break
        for sampler in (student, teacher):
            sampler.reset_mm_cache()
        ckpt_manager.sync_weights(merge_and_sync=False)
        student.reset_prefix_cache()
        student.reset_encoder_cache()
        sampled = student.sample(batch, SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=1, logprobs=1))
        features = [sequence.new_input_feature for response in sampled for sequence in response.sequences]
        scored = teacher.sample(features, SamplingParams(max_tokens=0, prompt_logprobs=TOPK))
        logprobs, indices = teacher_topk(scored)
        model.forward_backward(inputs=features, teacher_topk_logprobs=logprobs, teacher_topk_indices=indices)
        model.clip_grad_and_step()
        step += 1
        if step % args.training.log_interval == 0:
            logger.info(f"[Step {step}/{MAX_STEPS}] {model.calculate_metric(is_training=True)}")
        if step % args.training.save_steps == 0:
            model.save(f"gkd-on-policy-checkpoint-{step}", output_dir=args.training.output_dir)
    logger.info(f"Training completed. Total steps: {step}")
    model.save("gkd-on-policy-final", output_dir=args.training.output_dir)


if __name__ == "__main__":
    main()
