"""Sequence parallelism beside FSDP: the call sequence of the existing script cookbook/transformers/sp_fsdp_dense.py."""

from collections.abc import Sequence
from functools import partial

from peft import LoraConfig

import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3-4B"
DATASET_ID = args.dataset.dataset_id or "ms://swift/self-cognition"
TEMPLATE = args.template.template_cls or "Template"
ADAPTER = args.lora.adapter_name or "default"

device_mesh = DeviceMesh.from_sizes(
    dp_size=args.infra.dp_size or 2, fsdp_size=args.infra.fsdp_size or 2, ulysses_size=args.infra.ulysses_size or 2
)
twinkle.initialize(
    mode=args.infra.mode,
    nproc_per_node=args.infra.nproc_per_node,
    global_device_mesh=device_mesh,
    lazy_collect=args.infra.lazy_collect,
)


def create_dataset(data_slice: Sequence[int] | None = None) -> Dataset:
    dataset = Dataset(dataset_meta=DatasetMeta(DATASET_ID, data_slice=data_slice))
    dataset.set_template(TEMPLATE, model_id=MODEL_ID)
    dataset.map(SelfCognitionProcessor("twinkle model", "ModelScope team"))
    dataset.encode(batched=True)
    return dataset


def train() -> None:
    dataloader = DataLoader(
        dataset=partial(create_dataset, data_slice=None),
        batch_size=args.training.batch_size,
        device_mesh=device_mesh,
    )
    model = TransformersModel(model_id=MODEL_ID, device_mesh=device_mesh, strategy=args.model.strategy)
    lora_config = LoraConfig(**args.get_lora_args())
    model.add_adapter_to_model(
        ADAPTER, lora_config, gradient_accumulation_steps=args.training.gradient_accumulation_steps
    )
    model.set_optimizer("AdamW", lr=args.optimizer.learning_rate, adapter_name=ADAPTER)
    model.set_lr_scheduler(
        scheduler_cls="CosineWarmupScheduler",
        num_warmup_steps=args.scheduler.num_warmup_steps,
        num_training_steps=len(dataloader),
        adapter_name=ADAPTER,
    )
    logger.info(get_device_placement())
    logger.info(model.get_train_configs(adapter_name=ADAPTER))
    for step, batch in enumerate(dataloader):
        model.forward_backward(inputs=batch, adapter_name=ADAPTER)
        model.clip_grad_and_step(adapter_name=ADAPTER)
        if step % args.training.log_interval == 0:
            metric = model.calculate_metric(is_training=True, adapter_name=ADAPTER)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {metric}")
    model.save("last-checkpoint", interval=1, adapter_name=ADAPTER)


if __name__ == "__main__":
    train()
