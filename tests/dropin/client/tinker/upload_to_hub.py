"""Uploading a checkpoint: the call sequence of the existing script client/tinker/…/upload_to_hub.py."""

import os

import dotenv

dotenv.load_dotenv(".env")

from twinkle import init_twinkle_client  # noqa: E402
from twinkle_client.model import MultiLoraTransformersModel  # noqa: E402

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
CHECKPOINT = "twinkle://REPLACE_ME/weights/REPLACE_ME"
HUB_MODEL_ID = "your_username/your-model-name"
HUB_TOKEN = None

if __name__ == "__main__":
    init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)
    model = MultiLoraTransformersModel(model_id=f"ms://{MODEL_ID}")
    model.upload_to_hub(checkpoint_dir=CHECKPOINT, hub_model_id=HUB_MODEL_ID, hub_token=HUB_TOKEN)
    print(f"Upload complete: https://modelscope.cn/models/{HUB_MODEL_ID}")
