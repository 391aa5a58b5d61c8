"""DPO on a server: the call sequence of the existing script client/twinkle/…/dpo.py."""

import os
from typing import Any

import dotenv

dotenv.load_dotenv(".env")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402

from twinkle import get_logger, init_twinkle_client  # noqa: E402
from twinkle.dataloader import DataLoader  # noqa: E402
from twinkle.dataset import Dataset, DatasetMeta  # noqa: E402
from twinkle.preprocessor import EmojiDPOProcessor  # noqa: E402
from twinkle_client.model import MultiLoraTransformersModel  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ROWS = 100
BATCH_SIZE = 4
ACCUMULATION = 2
SYSTEM = "You are a helpful assistant."

client = init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)
for run in client.list_training_runs():
    logger.info(run.model_dump_json(indent=2))
    for checkpoint in client.list_checkpoints(run.training_run_id):
        logger.info(checkpoint.model_dump_json(indent=2))


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with lists in the place of arrays, which JSON does not have."""
    return {
        key: value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value for key, value in row.items()
    }


def interleave(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the order that DPOLoss expects: positive, negative, positive, negative, …"""
    rows = []
    for item in batch:
        others = {key: value for key, value in item.items() if key not in ("positive", "negative")}
        rows += [plain({**others, **item["positive"]}), plain({**others, **item["negative"]})]
    return rows


def train() -> None:
    dataset = Dataset(DatasetMeta("ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji", data_slice=range(ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", max_length=2048)
    dataset.map(EmojiDPOProcessor, init_args={"system": SYSTEM})
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE)

    model = MultiLoraTransformersModel(model_id=f"ms://{MODEL_ID}")
    lora_config = LoraConfig(target_modules="all-linear", r=8, lora_alpha=32, lora_dropout=0.05)
    model.add_adapter_to_model("default", lora_config, gradient_accumulation_steps=ACCUMULATION)
    model.set_template("Qwen3_5Template")
    model.set_processor("InputProcessor", padding_side="right")
    model.set_loss("DPOLoss", beta=0.1, loss_type="sigmoid", reference_free=False, sft_weight=1.0)
    model.add_metric("DPOMetric", beta=0.1)
    model.set_optimizer("Adam", lr=1e-4)
    logger.info(model.get_train_configs().model_dump())

    for step, batch in enumerate(dataloader, start=1):
        rows = interleave(batch)
        ref_outputs = model.forward_only(inputs=rows, disable_lora=True)
        model.forward_backward(inputs=rows, ref_outputs=ref_outputs.result)
        model.clip_grad_and_step()
        if step % 2 == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"[Step {step}/{len(dataloader)}] {metric}")
    result = model.save(name="dpo-lora-final", save_optimizer=True)
    logger.info(f"Saved checkpoint: {result}")


if __name__ == "__main__":
    train()
