"""SFT with tensor and pipeline parallelism: the call sequence of the existing script cookbook/megatron/tp.py."""

from peft import LoraConfig
from tqdm import tqdm

import twinkle
from twinkle import DeviceMesh, Platform, get_device_placement, get_logger
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import MegatronModel
from twinkle.preprocessor import SelfCognitionProcessor

logger = get_logger()
args = CLI.from_args()

MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3.5-4B"
DATASET_ID = args.dataset.dataset_id or "ms://swift/self-cognition"
TEMPLATE = args.template.template_cls or "Qwen3_5Template"
OUTPUT_DIR = args.training.output_dir or "./output/megatron_tp"
ADAPTER = args.lora.adapter_name or "default"
TRAIN_SAMPLES = args.training.train_samples or 1000
EVAL_SAMPLES = args.training.eval_samples or 100
EVAL_INTERVAL = args.training.eval_interval or 40

device_mesh = DeviceMesh.from_sizes(
    dp_size=args.infra.dp_size or 1,
    tp_size=args.infra.tp_size or 2,
    pp_size=args.infra.pp_size or 2,
    cp_size=args.infra.cp_size or 2,
)
twinkle.initialize(mode=args.infra.mode, global_device_mesh=device_mesh)


def build_dataset(num_samples: int) -> Dataset:
    dataset = Dataset(dataset_meta=DatasetMeta(DATASET_ID, data_slice=range(num_samples)))
    dataset.set_template(
        TEMPLATE,
        model_id=MODEL_ID,
        max_length=args.template.max_length,
        truncation_strategy=args.template.truncation_strategy,
    )
    dataset.map(SelfCognitionProcessor("twinkle model", "ModelScope team"))
    dataset.encode()
    return dataset


def evaluate(model: MegatronModel) -> float:
    dataloader = DataLoader(dataset=build_dataset(EVAL_SAMPLES), batch_size=args.training.batch_size)
    for batch in tqdm(dataloader, disable=not Platform.is_master()):
        model.forward_only(inputs=batch)
    return float(model.calculate_metric(is_training=False)["loss"])


def train() -> None:
    dataloader = DataLoader(dataset=build_dataset(TRAIN_SAMPLES), batch_size=args.training.batch_size)
    model = MegatronModel(model_id=MODEL_ID)
    lora_config = LoraConfig(**args.get_lora_args())
    model.add_adapter_to_model(
        ADAPTER, lora_config, gradient_accumulation_steps=args.training.gradient_accumulation_steps
    )
    model.set_optimizer(optimizer_cls="default", lr=args.optimizer.learning_rate)
    model.set_lr_scheduler(
        scheduler_cls="default", lr_warmup_steps=args.scheduler.num_warmup_steps, lr_decay_steps=len(dataloader)
    )
    if args.training.resume_from_checkpoint:
        progress = model.resume_from_checkpoint(
            args.training.resume_from_checkpoint,
            resume_only_model=args.training.resume_only_model,
            adapter_name=ADAPTER,
        )
        if not args.training.ignore_data_skip:
            dataloader.resume_from_checkpoint(progress["consumed_train_samples"])
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())
    logger.info(f"Total steps: {len(dataloader)}")
    best = float("inf")
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        cur_step = model.optimizer_group[ADAPTER].cur_step
        if cur_step % args.training.log_interval == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {cur_step} of {len(dataloader)}, metric: {metric}")
        if cur_step % EVAL_INTERVAL == 0:
            loss = evaluate(model)
            logger.info(f"Eval loss: {loss}")
            if loss < best:
                best = loss
                save(model, dataloader, f"checkpoint-{cur_step}")
    save(model, dataloader, "last-checkpoint")


def save(model: MegatronModel, dataloader: DataLoader, name: str) -> None:
    model.save(
        name,
        output_dir=OUTPUT_DIR,
        adapter_name=ADAPTER,
        save_optimizer=True,
        consumed_train_samples=dataloader.get_state()["consumed_train_samples"],
    )


if __name__ == "__main__":
    train()
