"""Embeddings with InfoNCE on a server: the call sequence of the existing script client/twinkle/…/embedding.py."""

import os

import dotenv

dotenv.load_dotenv(".env")

from peft import LoraConfig  # noqa: E402

from twinkle import get_logger, init_twinkle_client  # noqa: E402
from twinkle.template import Qwen3_5Template  # noqa: E402
from twinkle_client.model import MultiLoraTransformersModel  # noqa: E402

logger = get_logger()

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
STEPS = 10
PAIRS = [
    ("What is the capital of France?", "Paris is the capital of France."),
    ("How many legs has a spider?", "A spider has eight legs."),
    ("Who wrote Hamlet?", "Shakespeare is the author of Hamlet."),
    ("What is water made of?", "Water is hydrogen and oxygen."),
    ("Where do penguins live?", "Penguins live in the south."),
    ("When does the sun rise?", "The sun rises in the morning."),
]


def main() -> None:
    init_twinkle_client(base_url=BASE_URL, api_key=API_KEY)
    template = Qwen3_5Template(f"ms://{MODEL_ID}", max_length=512)
    features = []
    for anchor, positive in PAIRS:
        for text, label in ((anchor, 1), (positive, 0)):
            feature = template.encode({"messages": [{"role": "user", "content": text}]})
            features.append({"input_ids": feature["input_ids"].tolist(), "labels": [label]})

    model = MultiLoraTransformersModel(model_id=f"ms://{MODEL_ID}")
    model.add_adapter_to_model("emb_adapter", LoraConfig(target_modules="all-linear"))
    model.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}")
    model.set_processor("InputProcessor")
    model.set_loss("InfonceLoss", temperature=0.07, use_batch=True, hard_negatives=None)
    model.set_optimizer("Adam", lr=1e-4)
    model.add_metric("EmbeddingMetric", is_training=True)

    for step in range(STEPS):
        model.forward_backward(inputs=features, task="embedding")
        model.clip_grad_and_step(max_grad_norm=1.0)
        metric = model.calculate_metric(is_training=True)
        logger.info(f"[Step {step}] {metric.result}")


if __name__ == "__main__":
    main()
