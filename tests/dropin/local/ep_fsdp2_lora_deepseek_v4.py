"""SFT of an adapter on experts with FSDP2 and expert parallelism under torchrun: the call sequence of the existing
script cookbook/transformers/ep_fsdp2_lora_deepseek_v4.py."""

from peft import LoraConfig
from transformers import AutoConfig

import twinkle
from twinkle import DeviceMesh, Platform, get_device_placement, get_logger
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.hub import HubOperation
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://deepseek-ai/DeepSeek-V4"
DATASET_ID = args.dataset.dataset_id or "ms://swift/self-cognition"
TEMPLATE = args.template.template_cls or "Qwen3_5Template"
ADAPTER = args.lora.adapter_name or "default"
TRAIN_SAMPLES = args.training.train_samples or 1000

device_mesh = DeviceMesh.from_sizes(
    fsdp_size=args.infra.fsdp_size or 4,
    dp_size=args.infra.dp_size or 1,
    ep_size=args.infra.ep_size or 4,
    device_type=Platform.get_platform().device_prefix(),
)
twinkle.initialize(mode=args.infra.mode, global_device_mesh=device_mesh)


def build_dataset() -> Dataset:
    dataset = Dataset(dataset_meta=DatasetMeta(DATASET_ID, data_slice=range(TRAIN_SAMPLES)))
    try:
        dataset.set_template(TEMPLATE, model_id=MODEL_ID)
    except ValueError:
        dataset.set_template("Qwen3_5Template", model_id=MODEL_ID)
    dataset.map(SelfCognitionProcessor("twinkle model", "ModelScope team"))
    dataset.encode(batched=True)
    return dataset


def train() -> None:
    dataloader = DataLoader(dataset=build_dataset(), batch_size=args.training.batch_size, device_mesh=device_mesh)
    config = AutoConfig.from_pretrained(HubOperation.download_model(MODEL_ID))
    model = TransformersModel(
        model_id=MODEL_ID,
        config=config,
        device_mesh=device_mesh,
        strategy="native_fsdp",
        memory_efficient_init=True,
        fsdp_config={"expert_parallel": {"enabled": True, "router_dtype": "fp32", "keep_router_logits": False}},
    )
    lora_config = LoraConfig(
        r=args.lora.lora_r,
        lora_alpha=args.lora.lora_alpha,
        target_modules="all-linear",
        exclude_modules=["gate", "k_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    steps = args.training.gradient_accumulation_steps
    model.add_adapter_to_model(ADAPTER, lora_config, gradient_accumulation_steps=steps)
    model.set_optimizer("AdamW", lr=args.optimizer.learning_rate, foreach=False)
    model.set_lr_scheduler(
        scheduler_cls="CosineWarmupScheduler",
        num_warmup_steps=args.scheduler.num_warmup_steps,
        num_training_steps=len(dataloader),
    )
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())
    for step, each in enumerate(dataloader):
        batch = each() if callable(each) else each
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step(max_grad_norm=1.0, gradient_accumulation_steps=steps)
        if step % args.training.log_interval == 0:
            logger.info(f"Current is step {step} of {len(dataloader)}: {model.calculate_metric(is_training=True)}")
    model.save(name="last-checkpoint")


if __name__ == "__main__":
    train()
