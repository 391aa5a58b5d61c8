"""DPO with the tinker SDK: the call sequence of the existing script client/tinker/…/dpo.py."""

import os
from typing import Any

import dotenv

dotenv.load_dotenv(".env")

import swanlab  # noqa: E402, F401
from tqdm import tqdm  # noqa: E402

from twinkle import get_logger, init_tinker_client  # noqa: E402
from twinkle.dataloader import DataLoader  # noqa: E402
from twinkle.dataset import DatasetMeta, LazyDataset  # noqa: E402
from twinkle.preprocessor import EmojiDPOProcessor  # noqa: E402
from twinkle.server.common import input_feature_to_datum  # noqa: E402

init_tinker_client()

from tinker import ServiceClient, types  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ROWS = 5000
BATCH_SIZE = 4
LEARNING_RATE = 1e-4
DPO_BETA = 0.1
SFT_WEIGHT = 1.0
SYSTEM_PROMPT = "You are a helpful assistant."


def create_dpo_dataset() -> LazyDataset:
    meta = DatasetMeta("ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji", data_slice=range(ROWS))
    dataset = LazyDataset(meta)
    dataset.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", max_length=2048)
    dataset.map(EmojiDPOProcessor, init_args={"system": SYSTEM_PROMPT})
    dataset.encode()
    return dataset


def prepare_dpo_batch(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for row in batch:
        base_fields = {key: value for key, value in row.items() if key not in ("positive", "negative")}
        result.append({**base_fields, **row["positive"]})
        result.append({**base_fields, **row["negative"]})
    return result


def train() -> None:
    dataloader = DataLoader(dataset=create_dpo_dataset(), batch_size=BATCH_SIZE)
    service_client = ServiceClient(base_url=BASE_URL, api_key=API_KEY)
    training_client = service_client.create_lora_training_client(base_model=MODEL_ID, rank=8)

    for step, batch in enumerate(tqdm(dataloader)):
        input_datums = [input_feature_to_datum(row) for row in prepare_dpo_batch(batch)]
        ref_result = training_client.forward(
            input_datums, "cross_entropy", loss_fn_config={"disable_lora": True}
        ).result()
        for datum, output in zip(input_datums, ref_result.loss_fn_outputs, strict=True):
            length = len(datum.loss_fn_inputs["target_tokens"].data)
            datum.loss_fn_inputs["ref_logps"] = types.TensorData(
                data=output["logprobs"].data[:length], dtype="float32", shape=[length]
            )
        fwdbwd_result = training_client.forward_backward(
            input_datums,
            "importance_sampling",
            loss_fn_config={"dpo_beta": DPO_BETA, "dpo_sft_weight": SFT_WEIGHT},
        ).result()
        optim_result = training_client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
        logger.info(f"[Step {step}] {fwdbwd_result.metrics} {optim_result.metrics}")
    save_result = training_client.save_state("dpo-lora-final").result()
    logger.info(f"Saved checkpoint to {save_result.path}")


if __name__ == "__main__":
    train()
