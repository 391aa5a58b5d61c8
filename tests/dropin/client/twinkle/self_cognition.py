"""Supervised fine-tuning on a server: the call sequence of the existing script client/twinkle/…/self_cognition.py."""

import os
import tempfile

import dotenv

dotenv.load_dotenv(".env")

from peft import LoraConfig  # noqa: E402

from twinkle import get_logger, init_twinkle_client  # noqa: E402
from twinkle.dataloader import DataLoader  # noqa: E402
from twinkle.dataset import Dataset, DatasetMeta  # noqa: E402
from twinkle_client.model import MultiLoraTransformersModel  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ROWS = 500
MAX_STEPS = 10

client = init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)
print("Available models:")
for item in client.get_server_capabilities().supported_models:
    print("- " + item.model_name)

resume_path = None
for run in client.list_training_runs():
    logger.info(run.model_dump_json(indent=2))
    for checkpoint in client.list_checkpoints(run.training_run_id):
        logger.info(checkpoint.model_dump_json(indent=2))


def train() -> None:
    dataset = Dataset(dataset_meta=DatasetMeta("ms://swift/self-cognition", data_slice=range(ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", max_length=512)
    dataset.map("SelfCognitionProcessor", init_args={"model_name": "twinkle model", "model_author": "ModelScope Team"})
    dataset.encode(batched=True)
    dataloader = DataLoader(dataset=dataset, batch_size=4)

    model = MultiLoraTransformersModel(model_id=f"ms://{MODEL_ID}")
    lora_config = LoraConfig(target_modules="all-linear")
    save_dir = os.path.join(tempfile.gettempdir(), "twinkle_sft_output")
    model.add_adapter_to_model("default", lora_config, gradient_accumulation_steps=2, save_dir=save_dir)
    model.set_template("Qwen3_5Template")
    model.set_processor("InputProcessor", padding_side="right")
    model.set_loss("CrossEntropyLoss")
    model.set_optimizer("Adam", lr=1e-4)
    if resume_path:
        progress = model.resume_from_checkpoint(resume_path)
        dataloader.resume_from_checkpoint(progress["consumed_train_samples"])
    logger.info(model.get_train_configs().model_dump())

    for cur_step, batch in enumerate(dataloader, start=1):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if cur_step % 2 == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {cur_step} of {len(dataloader)}, metric: {metric.result}")
        if cur_step >= MAX_STEPS:
            logger.info(f"Reached max_steps={MAX_STEPS}, stopping training.")
            return
    state = dataloader.get_state()
    saved = model.save(
        name="twinkle-epoch-0", save_optimizer=True, consumed_train_samples=state["consumed_train_samples"]
    )
    logger.info(f"Saved checkpoint: {saved.twinkle_path}")


if __name__ == "__main__":
    train()
