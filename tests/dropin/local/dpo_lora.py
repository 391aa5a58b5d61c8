"""DPO with LoRA on Ray: the call sequence of the existing script cookbook/rl/dpo/dpo_lora.py.

With ``--strategy native_fsdp`` the model is a TransformersModel, else a MegatronModel.
"""

from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.loss import DPOLoss
from twinkle.metric import DPOMetric
from twinkle.model import MegatronModel, TransformersModel
from twinkle.preprocessor import EmojiDPOProcessor
from twinkle.processor import InputProcessor

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3-4B"
DATASET_ID = args.dataset.dataset_id or "ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji"
USE_MEGATRON = args.model.strategy != "native_fsdp"
MODEL_GPUS = args.infra.model_gpus or 8
RANKS = list(range(MODEL_GPUS))
DEVICE_TYPE = "GPU"
ATTN_IMPLEMENTATION = "flash_attention_2"
ROWS = 6000
SYSTEM_PROMPT = "You are a helpful assistant."
ADAPTER_NAME = "default"


def create_dpo_dataset() -> Dataset:
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=args.template.max_length)
    dataset.map(EmojiDPOProcessor, init_args={"system": SYSTEM_PROMPT})
    dataset.encode(load_from_cache_file=True)
    return dataset


def prepare_dpo_batch(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for row in batch:
        base_fields = {key: value for key, value in row.items() if key not in ("positive", "negative")}
        result.append({**base_fields, **row["positive"]})
        result.append({**base_fields, **row["negative"]})
    return result


def main() -> None:
    device_groups = [DeviceGroup(name="policy", ranks=RANKS, device_type=DEVICE_TYPE)]
    if USE_MEGATRON:
        policy_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS // 2, pp_size=2)
    else:
        policy_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, fsdp_size=MODEL_GPUS)
    twinkle.initialize(mode="ray", nproc_per_node=MODEL_GPUS, groups=device_groups)

    batch_size = args.training.batch_size
    dataloader = DataLoader(
        dataset=create_dpo_dataset, batch_size=batch_size, min_batch_size=batch_size, device_mesh=policy_mesh
    )
    max_steps = min(len(dataloader), args.training.max_steps)

    lora_config = LoraConfig(
        target_modules="all-linear",
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        lora_dropout=args.lora.lora_dropout,
    )
    options = {"variable_seq_lengths": True} if USE_MEGATRON else {"attn_implementation": ATTN_IMPLEMENTATION}
    model_class = MegatronModel if USE_MEGATRON else TransformersModel
    policy_model = model_class(model_id=MODEL_ID, device_mesh=policy_mesh, remote_group="policy", **options)
    policy_model.add_adapter_to_model(
        ADAPTER_NAME, lora_config, gradient_accumulation_steps=args.training.gradient_accumulation_steps
    )
    if USE_MEGATRON:
        policy_model.set_optimizer("default", lr=args.optimizer.learning_rate)
        policy_model.set_lr_scheduler("default", lr_decay_steps=max_steps, max_lr=args.optimizer.learning_rate)
    else:
        policy_model.set_optimizer("AdamW", lr=args.optimizer.learning_rate, weight_decay=args.optimizer.weight_decay)
        policy_model.set_lr_scheduler("CosineAnnealingLR", T_max=max_steps, eta_min=args.optimizer.learning_rate * 0.1)
    loss = DPOLoss(
        beta=args.loss.beta,
        loss_type=args.loss.loss_type,
        reference_free=False,
        sft_weight=args.loss.sft_weight,
    )
    policy_model.set_loss(loss)
    policy_model.add_metric(DPOMetric, beta=args.loss.beta)
    policy_model.set_processor(InputProcessor, padding_free=True)
    policy_model.set_template("Template", model_id=MODEL_ID)

    logger.info(get_device_placement())
    logger.info(policy_model.get_train_configs())
    step = 0
    for batch in dataloader:
        if step >= max_steps:
            break
        rows = prepare_dpo_batch(batch)
        ref_outputs = policy_model.forward_only(inputs=rows, disable_lora=True)
        policy_model.forward_backward(inputs=rows, ref_outputs=ref_outputs)
        policy_model.clip_grad_and_step()
        step += 1
        if step % args.training.log_interval == 0:
            metrics = policy_model.calculate_metric(is_training=True)
            logger.info(f"[Step {step}/{max_steps}] {metrics}")
        if step % args.training.save_steps == 0:
            policy_model.save(f"dpo-lora-checkpoint-{step}", output_dir=args.training.output_dir)
    logger.info(f"Training completed. Total steps: {step}")
    policy_model.save("dpo-lora-final-checkpoint", output_dir=args.training.output_dir)


if __name__ == "__main__":
    main()
