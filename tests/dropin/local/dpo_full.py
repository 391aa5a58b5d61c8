"""DPO of all parameters on Ray: the call sequence of the existing script cookbook/rl/dpo/dpo_full.py.

The reference model has a group of its own. With ``--strategy native_fsdp`` both are TransformersModels, else
MegatronModels.
"""

from typing import Any

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
MODEL_GPUS = args.infra.model_gpus or 4
REF_MODEL_GPUS = args.infra.ref_model_gpus or 4
NUM_GPUS = MODEL_GPUS + REF_MODEL_GPUS
POLICY_RANKS = list(range(MODEL_GPUS))
REFERENCE_RANKS = list(range(MODEL_GPUS, NUM_GPUS))
DEVICE_TYPE = "GPU"
ROWS = 6000
SYSTEM_PROMPT = "You are a helpful assistant."


def create_dpo_dataset() -> Dataset:
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=args.template.max_length)
    dataset.map(EmojiDPOProcessor, init_args={"system": SYSTEM_PROMPT})
    dataset.encode(load_from_cache_file=True)
    return dataset


def prepare_dpo_batch(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chosen and the rejected row of each pair, one after the other."""
    rows = []
    for pair in batch:
        shared = {key: value for key, value in pair.items() if key not in ("positive", "negative")}
        rows += [{**shared, **pair["positive"]}, {**shared, **pair["negative"]}]
    return rows


def create_mesh(gpus: int) -> DeviceMesh:
    if USE_MEGATRON:
        return DeviceMesh.from_sizes(world_size=gpus, dp_size=gpus // 2, pp_size=2)
    return DeviceMesh.from_sizes(world_size=gpus, fsdp_size=gpus)


def create_policy(mesh: DeviceMesh, max_steps: int) -> Any:
    rate = args.optimizer.learning_rate
    if USE_MEGATRON:
        policy = MegatronModel(
            model_id=MODEL_ID, device_mesh=mesh, remote_group="policy", mixed_precision=args.model.mixed_precision
        )
        policy.set_optimizer("default", lr=rate, weight_decay=args.optimizer.weight_decay)
        policy.set_lr_scheduler("default", lr_decay_steps=max_steps, max_lr=rate)
    else:
        policy = TransformersModel(model_id=MODEL_ID, device_mesh=mesh, remote_group="policy")
        policy.set_optimizer("AdamW", lr=rate, weight_decay=args.optimizer.weight_decay)
        policy.set_lr_scheduler("CosineAnnealingLR", T_max=max_steps, eta_min=rate * 0.1)
    loss = DPOLoss(
        beta=args.loss.beta, loss_type=args.loss.loss_type, reference_free=False, sft_weight=args.loss.sft_weight
    )
    policy.set_loss(loss)
    policy.add_metric(DPOMetric, beta=args.loss.beta)
    policy.set_processor(InputProcessor)
    policy.set_template("Template", model_id=MODEL_ID)
    return policy


def create_reference(mesh: DeviceMesh) -> Any:
    model_class = MegatronModel if USE_MEGATRON else TransformersModel
    reference = model_class(model_id=MODEL_ID, device_mesh=mesh, remote_group="reference")
    reference.set_processor(InputProcessor)
    reference.set_template("Template", model_id=MODEL_ID)
    return reference


def main() -> None:
    device_groups = [
        DeviceGroup(name="policy", ranks=POLICY_RANKS, device_type=DEVICE_TYPE),
        DeviceGroup(name="reference", ranks=REFERENCE_RANKS, device_type=DEVICE_TYPE),
    ]
    policy_mesh, reference_mesh = create_mesh(MODEL_GPUS), create_mesh(REF_MODEL_GPUS)
    twinkle.initialize(mode="ray", nproc_per_node=NUM_GPUS, groups=device_groups)

    batch_size = args.training.batch_size
    dataloader = DataLoader(
        dataset=create_dpo_dataset, batch_size=batch_size, min_batch_size=batch_size, device_mesh=policy_mesh
    )
    max_steps = min(len(dataloader), args.training.max_steps)
    policy_model = create_policy(policy_mesh, max_steps)
    ref_model = create_reference(reference_mesh)

    logger.info(get_device_placement())
    logger.info(policy_model.get_train_configs())
    step = 0
    for batch in dataloader:
        if step >= max_steps:
            break
        rows = prepare_dpo_batch(batch)
        ref_outputs = ref_model.forward_only(inputs=rows)
        policy_model.forward_backward(inputs=rows, ref_outputs=ref_outputs)
        policy_model.clip_grad_and_step(max_grad_norm=args.optimizer.max_grad_norm)
        step += 1
        if step % args.training.log_interval == 0:
            metrics = policy_model.calculate_metric(is_training=True)
            logger.info(f"[Step {step}/{max_steps}] {metrics}")
        if step % args.training.save_steps == 0:
            policy_model.save(f"dpo-full-checkpoint-{step}", output_dir=args.training.output_dir)
    logger.info(f"Training completed. Total steps: {step}")
    policy_model.save("dpo-full-final-checkpoint", output_dir=args.training.output_dir)


if __name__ == "__main__":
    main()
