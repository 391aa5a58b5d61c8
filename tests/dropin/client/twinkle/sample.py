"""Sampling with a saved adapter: the call sequence of the existing script client/twinkle/…/sample.py."""

import os

import dotenv

dotenv.load_dotenv(".env")

from transformers import AutoTokenizer  # noqa: E402, F401

from twinkle import get_logger, init_twinkle_client  # noqa: E402
from twinkle.data_format import Message, Trajectory  # noqa: E402
from twinkle_client.sampler import vLLMSampler  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ADAPTER_URI = "twinkle://20260301_142318-Qwen_Qwen3-4B-199d2cdb/weights/twinkle-lora-0"


def sample() -> None:
    init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)
    sampler = vLLMSampler(model_id=MODEL_ID)
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID)
    trajectory = Trajectory(
        messages=[
            Message(role="system", content="You are a helpful assistant."),
            Message(role="user", content="Who are you?"),
        ]
    )
    responses = sampler.sample(
        inputs=[trajectory] * 4,
        sampling_params={"max_tokens": 128, "temperature": 1.0, "num_samples": 2},
        adapter_uri=ADAPTER_URI,
    )
    for number, response in enumerate(responses):
        logger.info(f"Generated {len(response.sequences)} sequences for prompt {number}")
        for sequence in response.sequences:
            logger.info(f"{sequence.stop_reason}: {sequence.decoded}")


if __name__ == "__main__":
    sample()
