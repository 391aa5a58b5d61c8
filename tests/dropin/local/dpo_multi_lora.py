"""DPO of one of several adapters on Ray: the call sequence of the existing script cookbook/rl/dpo/dpo_multi_lora.py.

The model is a MultiLoraMegatronModel; every call names the adapter. The reference is the model without it.
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
from twinkle.model import MultiLoraMegatronModel
from twinkle.preprocessor import EmojiDPOProcessor
from twinkle.processor import InputProcessor

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3-4B"
DATASET_ID = args.dataset.dataset_id or "ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji"
MODEL_GPUS = args.infra.model_gpus or 8
RANKS = list(range(MODEL_GPUS))
DEVICE_TYPE = "GPU"
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


def create_model(mesh: DeviceMesh, max_steps: int) -> MultiLoraMegatronModel:
    model = MultiLoraMegatronModel(
        model_id=MODEL_ID,
        device_mesh=mesh,
        remote_group="policy",
        mixed_precision=args.model.mixed_precision,
        max_loras=2,
        max_r=args.lora.lora_r,
    )
    lora_config = LoraConfig(
        target_modules="all-linear",
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        lora_dropout=args.lora.lora_dropout,
    )
    steps = args.training.gradient_accumulation_steps
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=steps)
    model.set_optimizer("default", lr=args.optimizer.learning_rate, adapter_name=ADAPTER_NAME)
    model.set_lr_scheduler(
        "default", lr_decay_steps=max_steps, max_lr=args.optimizer.learning_rate, adapter_name=ADAPTER_NAME
    )
    loss = DPOLoss(
        beta=args.loss.beta, loss_type=args.loss.loss_type, reference_free=False, sft_weight=args.loss.sft_weight
    )
    model.set_loss(loss, adapter_name=ADAPTER_NAME)
    model.add_metric(DPOMetric, beta=args.loss.beta, adapter_name=ADAPTER_NAME)
    model.set_processor(InputProcessor, padding_free=True, adapter_name=ADAPTER_NAME)
    model.set_template("Template", model_id=MODEL_ID, adapter_name=ADAPTER_NAME)
    return model


def main() -> None:
    device_groups = [DeviceGroup(name="policy", ranks=RANKS, device_type=DEVICE_TYPE)]
    policy_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS // 2, tp_size=2)
    twinkle.initialize(mode="ray", nproc_per_node=MODEL_GPUS, groups=device_groups)

    batch_size = args.training.batch_size
    dataloader = DataLoader(
        dataset=create_dpo_dataset, batch_size=batch_size, min_batch_size=batch_size, device_mesh=policy_mesh
    )
    max_steps = min(len(dataloader), args.training.max_steps)
    policy_model = create_model(policy_mesh, max_steps)

    logger.info(get_device_placement())
    logger.info(policy_model.get_train_configs(adapter_name=ADAPTER_NAME))
    step = 0
    for batch in dataloader:
        if step >= max_steps:
            break
        rows = prepare_dpo_batch(batch)
        ref_outputs = policy_model.forward_only(inputs=rows, disable_lora=True, adapter_name=ADAPTER_NAME)
        policy_model.forward_backward(inputs=rows, ref_outputs=ref_outputs, adapter_name=ADAPTER_NAME)
        policy_model.clip_grad_and_step(adapter_name=ADAPTER_NAME)
        step += 1
        if step % args.training.log_interval == 0:
            metrics = policy_model.calculate_metric(is_training=True, adapter_name=ADAPTER_NAME)
            logger.info(f"[Step {step}/{max_steps}] {metrics}")
        if step % args.training.save_steps == 0:
            policy_model.save(
                f"dpo-lora-checkpoint-{step}", output_dir=args.training.output_dir, adapter_name=ADAPTER_NAME
            )
    logger.info(f"Training completed. Total steps: {step}")
    policy_model.save("dpo-lora-final-checkpoint", output_dir=args.training.output_dir, adapter_name=ADAPTER_NAME)


if __name__ == "__main__":
    main()
